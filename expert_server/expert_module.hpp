// What an expert computes: a list of tensors in, a list of tensors out.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace dmoe::expert_server {

/// One input or output of an expert.
struct TensorSpec {
  at::ScalarType dtype = at::kFloat;
  std::vector<std::int64_t> shape;  ///< Without dimension 0, the batch row; -1: any size.
  bool requires_grad = true;        ///< Inputs: whether backward returns a gradient for it.
};

struct ExpertSchema {
  std::vector<TensorSpec> inputs;
  std::vector<TensorSpec> outputs;
};

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

/// The gradient of one parameter: a tensor like it, or, for a matrix and a batch of few rows, the sum over rows of
/// outer products, which then never lies in memory: gradient[o][i] = sum over r of left[r][o] * right[r][i]. Neither:
/// it has none.
struct ParameterGradient {
  at::Tensor dense;
  at::Tensor left;   ///< [rows, outputs] float32, contiguous, as is `right`.
  at::Tensor right;  ///< [rows, inputs]
};

/// What back-propagation gives.
struct ExpertGradients {
  std::vector<at::Tensor> inputs;             ///< One per input.
  std::vector<ParameterGradient> parameters;  ///< One per trained parameter, in their order.
};

/// The function of one expert and its state. Used by one thread at a time, not always the same.
///
/// `forward` must treat rows independently (row i of each output depends on row i of the inputs only): tasks of many
/// callers are computed as one batch. It must not write to its inputs, and may throw: the call fails with its message.
class ExpertModule {
 public:
  ExpertModule() = default;
  virtual ~ExpertModule() = default;
  ExpertModule(const ExpertModule&) = delete;
  ExpertModule& operator=(const ExpertModule&) = delete;

  /// @param generator  the only source of randomness; seeded by the caller's seed, so that backward draws the same
  /// numbers, when `one_task_at_a_time` says that it is used.
  virtual std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs, at::Generator& generator) = 0;

  /// An architecture's own back-propagation through `forward`, where it is faster than autograd's. Nothing: autograd is
  /// asked. Neither stores anything; `with_parameters` false: gradients of the inputs are enough.
  virtual std::optional<ExpertGradients> backward(const std::vector<at::Tensor>& /*inputs*/,
                                                  const std::vector<at::Tensor>& /*grad_outputs*/,
                                                  bool /*with_parameters*/) {
    return std::nullopt;
  }

  virtual const ExpertSchema& schema() const = 0;
  virtual std::vector<NamedTensor> parameters() const = 0;         ///< Those with requires_grad are trained.
  virtual std::vector<NamedTensor> buffers() const { return {}; }  ///< State that is kept but not trained.
  /// Draws from the generator, or mixes rows of a batch: such tasks are computed one by one.
  virtual bool one_task_at_a_time() const { return false; }
  /// Shares nothing that changes with other experts, nor with the threads of its process: `forward`, and backward
  /// through it, may run while other experts are computed on other threads. Small batches are then computed at once.
  virtual bool runs_beside_others() const { return false; }
};

}  // namespace dmoe::expert_server
