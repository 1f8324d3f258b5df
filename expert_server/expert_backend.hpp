// One hosted expert: its module, its optimizer, and how often it learned.
#pragma once

#include "expert_server/expert_module.hpp"
#include "expert_server/optimizer.hpp"
#include "expert_server/snapshot_copy.hpp"
#include "net/error.hpp"
#include "net/expert_uid.hpp"

#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace dmoe::expert_server {

/// What an expert is, apart from its weights: two experts with equal descriptions have equal shapes everywhere.
struct ExpertDescription {
  ExpertUid uid;
  std::string architecture;
  std::int64_t hidden_dim = 0;
  std::map<std::string, std::string> arguments;
};

/// Everything a checkpoint holds of one expert. Tensors are copies, owned by the snapshot.
struct ExpertSnapshot {
  ExpertDescription description;
  OptimizerSettings optimizer;
  std::uint64_t updates = 0;
  std::vector<NamedTensor> parameters;
  std::vector<NamedTensor> buffers;
  std::vector<NamedTensor> optimizer_state;
};

/// Computes one expert. Everything but the const accessors belongs to the runtime: one thread at a time.
class ExpertBackend {
 public:
  /// `seed`: of the weights; nothing: a `restore` follows, and they need not be drawn.
  /// kInvalidArgument: the architecture, its arguments or the optimizer's settings do not fit.
  static Result<std::unique_ptr<ExpertBackend>> create(ExpertDescription description, OptimizerSettings optimizer,
                                                       std::int64_t max_batch_size, std::optional<std::uint64_t> seed);
  /// Around a module of one's own.
  ExpertBackend(ExpertDescription description, std::unique_ptr<ExpertModule> module, OptimizerSettings optimizer,
                std::int64_t max_batch_size);

  /// Moves weights, buffers and optimizer state; computes there from now on. Callers' tensors stay on the host. Not
  /// while it is served.
  void place(const c10::Device& device);
  const c10::Device& device() const noexcept { return device_; }

  const ExpertDescription& description() const noexcept { return description_; }
  const ExpertUid& uid() const noexcept { return description_.uid; }
  const std::string& uid_text() const noexcept { return uid_text_; }
  const ExpertSchema& schema() const noexcept { return schema_; }
  std::int64_t max_batch_size() const noexcept { return max_batch_size_; }
  bool one_task_at_a_time() const { return one_task_at_a_time_; }
  bool runs_beside_others() const { return runs_beside_others_; }
  std::uint64_t updates() const noexcept { return updates_.load(std::memory_order_relaxed); }  ///< Any thread.
  double last_gradient_norm() const noexcept { return gradient_norm_.load(std::memory_order_relaxed); }

  /// From now on `backward` returns gradients and changes nothing. Before the expert is served.
  void freeze();

  /// Without grad; leaves parameters and buffers as they were, also those of layers like BatchNorm: only backward,
  /// which repeats the forward pass, moves running statistics, so that a training step moves them once.
  /// @param inputs  as the schema says (see check_tensors), at least one row. Never written to.
  /// kInternal: the expert threw, or returned something else than its schema says.
  Result<std::vector<at::Tensor>> forward(const std::vector<at::Tensor>& inputs, std::uint64_t rng_seed);

  /// Repeats forward with the same seed, back-propagates, clips, steps the optimizer.
  /// @return one gradient per input, an empty tensor for an input without one.
  /// kInvalidArgument: a gradient of another shape than the outputs, or one that became NaN or Inf on its way back.
  /// Whatever fails, weights, buffers, optimizer state and counter are as before.
  Result<std::vector<at::Tensor>> backward(const std::vector<at::Tensor>& inputs,
                                           const std::vector<at::Tensor>& grad_outputs, std::uint64_t rng_seed);

  /// Whether a call would succeed by itself: computes all of it, and changes nothing. Without `grad_outputs`: forward.
  Result<void> rehearse(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& grad_outputs,
                        std::uint64_t rng_seed);

  /// Gives weights and optimizer state back to the system; the const accessors work as before, nothing else does
  /// before `revive`. A snapshot must exist elsewhere.
  void evict();
  bool evicted() const noexcept { return module_ == nullptr; }
  /// Makes the module anew and takes over a snapshot, as `restore` does. On an error it stays evicted.
  Result<void> revive(ExpertSnapshot snapshot);

  /// A consistent copy: weights, optimizer state and counter belong to the same step.
  ExpertSnapshot snapshot() const;

  /// The same in pieces, between which the expert is served. What `reserve_snapshot` returns has names and untouched
  /// memory; that may be populated by any thread. It is of the moment of `begin_snapshot`, and complete when
  /// `copy_snapshot` returned true: a backward in between copies the rest before it changes anything. The newer
  /// reservation gives up the older one. May throw std::bad_alloc.
  std::shared_ptr<const ExpertSnapshot> reserve_snapshot();
  void begin_snapshot();
  bool copy_snapshot(std::size_t bytes);  ///< Copies about `bytes` more. True: none is left.

  /// Takes over a snapshot of an equal description and optimizer kind; on the CPU its tensors become the expert's own,
  /// so that a large expert is not copied. An empty optimizer state starts afresh.
  /// kInvalidArgument naming what does not fit, with both shapes; nothing has changed then.
  Result<void> restore(ExpertSnapshot snapshot);

 private:
  class BufferGuard;
  Result<std::vector<at::Tensor>> run_backward(const std::vector<at::Tensor>& inputs,
                                               const std::vector<at::Tensor>& grad_outputs, std::uint64_t rng_seed);
  Result<ExpertGradients> find_gradients(const std::vector<at::Tensor>& inputs,
                                         const std::vector<at::Tensor>& grad_outputs, std::uint64_t rng_seed);
  Result<ExpertGradients> gradients_by_autograd(const std::vector<at::Tensor>& inputs,
                                                const std::vector<at::Tensor>& grad_outputs, std::uint64_t rng_seed);
  void reserve_pending();
  std::vector<NamedTensor> live_tensors() const;
  void adopt_module(std::unique_ptr<ExpertModule> module);
  Result<std::vector<at::Tensor>> checked(std::vector<at::Tensor> outputs, std::int64_t rows) const;
  Error failure(const char* direction, const std::exception& cause) const;

  struct Pending {
    std::shared_ptr<ExpertSnapshot> snapshot;
    SnapshotCopy copy;
  };

  ExpertDescription description_;
  std::string uid_text_;
  std::unique_ptr<ExpertModule> module_;  ///< Null while evicted.
  ExpertSchema schema_;                   ///< Of the module, as are the next two.
  bool one_task_at_a_time_;
  bool runs_beside_others_;
  std::vector<NamedTensor> trained_;
  std::vector<NamedTensor> buffers_;
  Optimizer optimizer_;
  c10::Device device_{c10::kCPU};
  at::Generator generator_;  ///< Of the device.
  std::int64_t max_batch_size_;
  bool frozen_ = false;
  std::optional<Pending> pending_;
  std::atomic<std::uint64_t> updates_{0};
  std::atomic<double> gradient_norm_{0};
};

/// Rows of a call: dimension 0 of its first tensor, the same in each.
/// kInvalidArgument: count, dtype or shape differ from `specs`, or the tensors disagree on the rows. `what`: "input" or
/// "gradient", for the message.
Result<std::int64_t> check_tensors(const std::vector<at::Tensor>& tensors, const std::vector<TensorSpec>& specs,
                                   const char* what);

}  // namespace dmoe::expert_server
