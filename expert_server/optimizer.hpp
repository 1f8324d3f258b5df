// Gradient steps with all of their state in named tensors, so that a checkpoint holds them.
#pragma once

#include "expert_server/expert_module.hpp"
#include "expert_server/learning_schedule.hpp"
#include "net/error.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace dmoe::expert_server {

enum class OptimizerKind {
  kAdam,   ///< Kingma and Ba 2015, with AMSGrad (Reddi et al. 2018) unless told otherwise; as torch::optim::Adam.
  kAdamW,  ///< Decoupled weight decay (Loshchilov and Hutter 2019), as torch::optim::AdamW.
  kSgd,    ///< With optional momentum, plain or Nesterov's, as torch::optim::SGD.
};

Result<OptimizerKind> parse_optimizer(const std::string& name);
std::string to_string(OptimizerKind kind);

struct OptimizerSettings {
  OptimizerKind kind = OptimizerKind::kAdam;
  double learning_rate = 1e-3;
  double beta1 = 0.9;     ///< Adam and AdamW.
  double beta2 = 0.999;   ///< Adam and AdamW.
  double epsilon = 1e-8;  ///< Adam and AdamW.
  bool amsgrad = true;    ///< Adam and AdamW: divide by the largest second moment so far.
  double momentum = 0;    ///< SGD only.
  bool nesterov = false;  ///< SGD with momentum only.
  double weight_decay = 0;
  LearningSchedule schedule;
  double clip_grad_norm = 1;  ///< Largest 2-norm over all gradients of a step; 0: no limit.

  friend bool operator==(const OptimizerSettings&, const OptimizerSettings&) = default;
};

/// kInvalidArgument naming the value that is out of range.
Result<void> check(const OptimizerSettings& settings);

/// Updates parameters in place. Used by one thread at a time. One pass over memory per parameter: gradient, state and
/// weights are read and written once, where a chain of torch operations would do so ten times.
class Optimizer {
 public:
  /// `parameters`: contiguous float32 or float64 tensors, all on one device.
  Optimizer(OptimizerSettings settings, std::vector<NamedTensor> parameters);

  /// Clips and applies one gradient per parameter; an undefined one leaves its parameter and state alone. The learning
  /// rate is that of the schedule after `steps` steps.
  /// @return the gradients' 2-norm before clipping, or kInvalidArgument when it is not finite: nothing has changed
  /// then.
  Result<double> step(const std::vector<at::Tensor>& gradients, std::uint64_t steps = 0);
  Result<double> step(const std::vector<ParameterGradient>& gradients, std::uint64_t steps = 0);

  /// The gradients' 2-norm, or what `step` would refuse them with.
  Result<double> norm(const std::vector<ParameterGradient>& gradients) const;

  const OptimizerSettings& settings() const noexcept { return settings_; }

  /// What must be kept to go on exactly: "<parameter>.exp_avg", … and "<parameter>.step". Only parameters that have
  /// been stepped have any. The tensors are the live ones: copy them before the next step.
  std::vector<NamedTensor> state() const;
  /// Takes over a state of the same parameters: its tensors become the optimizer's own, or are copied to where the
  /// parameter is. Parameters that it leaves out start afresh.
  /// kInvalidArgument naming a tensor that is unknown, or of another shape or dtype; nothing has changed then.
  Result<void> load_state(std::vector<NamedTensor> state);

  /// The parameters are on this device now: the state follows them.
  void move_to(const c10::Device& device);

 private:
  struct Slot {
    NamedTensor parameter;
    std::int64_t step = 0;
    std::vector<at::Tensor> state;  ///< In the order of state_names(); empty before the first step.
  };

  std::vector<std::string> state_names() const;
  void prepare(Slot& slot) const;
  void apply(Slot& slot, const at::Tensor& gradient, double scale, double rate) const;
  void apply_outer(Slot& slot, const ParameterGradient& gradient, double scale, double rate) const;

  OptimizerSettings settings_;
  std::vector<Slot> slots_;
};

}  // namespace dmoe::expert_server
