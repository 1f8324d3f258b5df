#include "expert_server/optimizer.hpp"

#include "expert_server/device_steps.hpp"
#include "expert_server/invalid.hpp"
#include "expert_server/large_tensor.hpp"
#include "expert_server/optimizer_steps.hpp"

#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

namespace dmoe::expert_server {
namespace {

AdamFactors adam_factors(const OptimizerSettings& settings, std::int64_t step, double scale, double rate) {
  const double first = 1 - std::pow(settings.beta1, static_cast<double>(step));
  const double second = 1 - std::pow(settings.beta2, static_cast<double>(step));
  const bool decoupled = settings.kind == OptimizerKind::kAdamW;
  return {scale,
          decoupled ? 0 : settings.weight_decay,
          decoupled ? 1 - rate * settings.weight_decay : 1,
          settings.beta1,
          settings.beta2,
          rate / first,
          1 / std::sqrt(second),
          settings.epsilon};
}

SgdFactors sgd_factors(const OptimizerSettings& settings, double scale, double rate, bool first) {
  return {scale, settings.weight_decay, rate, settings.momentum, settings.nesterov, first};
}

/// A parameter and what is kept of it.
template <class T>
struct StepMemory {
  T* weight;
  const T* gradient;
  std::array<T*, 3> state{};  ///< Null: not kept.

  AdamMemory<T> adam() const { return {weight, gradient, state[0], state[1], state[2]}; }
  SgdMemory<T> sgd() const { return {weight, gradient, state[0]}; }
};

template <class T>
StepMemory<T> memory_of(const at::Tensor& weight, const std::vector<at::Tensor>& state, const T* gradient) {
  StepMemory<T> memory{weight.data_ptr<T>(), gradient};
  for (std::size_t i = 0; i < state.size() && i < memory.state.size(); ++i) {
    memory.state[i] = state[i].data_ptr<T>();
  }
  return memory;
}

OuterProducts outer_products(const ParameterGradient& gradient) {
  return {gradient.left.data_ptr<float>(), gradient.right.data_ptr<float>(), gradient.left.size(0),
          gradient.left.size(1), gradient.right.size(1)};
}

double squared_norm_of(const at::Tensor& gradient) {
  double sum = 0;
  AT_DISPATCH_FLOATING_TYPES(gradient.scalar_type(), "squared_norm",
                             [&] { sum = squared_norm(gradient.data_ptr<scalar_t>(), gradient.numel()); });
  return sum;
}

}  // namespace

Result<OptimizerKind> parse_optimizer(const std::string& name) {
  if (name == "adam") return OptimizerKind::kAdam;
  if (name == "adamw") return OptimizerKind::kAdamW;
  if (name == "sgd") return OptimizerKind::kSgd;
  return invalid("unknown optimizer " + name + "; known: adam, adamw (both with AMSGrad unless told otherwise), sgd");
}

std::string to_string(OptimizerKind kind) {
  switch (kind) {
    case OptimizerKind::kAdam: return "adam";
    case OptimizerKind::kAdamW: return "adamw";
    case OptimizerKind::kSgd: return "sgd";
  }
  return "adam";
}

Result<void> check(const OptimizerSettings& settings) {
  const auto within = [](double value, double least, double most) { return value >= least && value <= most; };
  if (!within(settings.learning_rate, 0, 1e6)) return invalid("learning_rate must be from 0 to 1e6");
  if (!within(settings.beta1, 0, 0.999999)) return invalid("beta1 must be at least 0 and below 1");
  if (!within(settings.beta2, 0, 0.999999999)) return invalid("beta2 must be at least 0 and below 1");
  if (!within(settings.epsilon, 0, 1)) return invalid("epsilon must be from 0 to 1");
  if (!within(settings.momentum, 0, 0.999999)) return invalid("momentum must be at least 0 and below 1");
  if (!within(settings.weight_decay, 0, 1e3)) return invalid("weight_decay must be from 0 to 1000");
  if (!within(settings.clip_grad_norm, 0, 1e30)) return invalid("clip_grad_norm must be from 0 to 1e30");
  if (settings.nesterov && settings.momentum == 0) return invalid("nesterov needs a momentum above 0");
  return check(settings.schedule);
}

Optimizer::Optimizer(OptimizerSettings settings, std::vector<NamedTensor> parameters) : settings_(settings) {
  for (auto& parameter : parameters) slots_.push_back({std::move(parameter), 0, {}});
}

std::vector<std::string> Optimizer::state_names() const {
  if (settings_.kind == OptimizerKind::kSgd) {
    return settings_.momentum > 0 ? std::vector<std::string>{"momentum_buffer"} : std::vector<std::string>{};
  }
  if (settings_.amsgrad) return {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  return {"exp_avg", "exp_avg_sq"};
}

Result<double> Optimizer::step(const std::vector<at::Tensor>& gradients, std::uint64_t steps) {
  std::vector<ParameterGradient> dense;
  dense.reserve(gradients.size());
  for (const auto& gradient : gradients) dense.push_back({gradient, {}, {}});
  return step(dense, steps);
}

Result<double> Optimizer::norm(const std::vector<ParameterGradient>& gradients) const {
  double squares = 0;
  double bound = 0;
  std::vector<at::Tensor> elsewhere;
  for (const auto& gradient : gradients) {
    if (gradient.left.defined()) {
      const auto norm = norm_of(outer_products(gradient));
      squares += norm.squared;
      bound = std::max(bound, norm.bound);
    } else if (gradient.dense.defined() && gradient.dense.device().is_cpu()) {
      squares += squared_norm_of(gradient.dense.contiguous());
    } else {
      elsewhere.push_back(gradient.dense);
    }
  }
  squares += squared_norm_on_device(elsewhere);
  // A product can overflow a float although its norm, in double, is finite.
  const bool overflows = !(bound <= std::numeric_limits<float>::max());
  if (!std::isfinite(squares) || overflows) {
    return invalid("the gradients of the expert's parameters are not finite: NaN or Inf");
  }
  return std::sqrt(squares);
}

Result<double> Optimizer::step(const std::vector<ParameterGradient>& gradients, std::uint64_t steps) {
  if (gradients.size() != slots_.size()) return Error{Errc::kInternal, "a gradient is missing", {}};
  auto usable = gradients;
  for (auto& gradient : usable) {
    if (gradient.dense.defined()) gradient.dense = gradient.dense.contiguous();
  }
  const auto norm = this->norm(usable);
  if (!norm) return norm;
  const double limit = settings_.clip_grad_norm;
  const double scale = limit > 0 && *norm > limit ? limit / *norm : 1.0;
  const double rate = settings_.learning_rate * settings_.schedule.factor(steps);
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (usable[i].left.defined()) {
      apply_outer(slots_[i], usable[i], scale, rate);
    } else if (usable[i].dense.defined()) {
      apply(slots_[i], usable[i].dense, scale, rate);
    }
  }
  return norm;
}

void Optimizer::prepare(Slot& slot) const {
  while (slot.state.size() < state_names().size()) {
    const auto& weight = slot.parameter.tensor;
    slot.state.push_back(weight.device().is_cpu() ? large_zeros(weight.sizes(), weight.scalar_type())
                                                  : at::zeros_like(weight));
  }
  ++slot.step;
}

void Optimizer::apply(Slot& slot, const at::Tensor& gradient, double scale, double rate) const {
  const bool first = slot.state.empty();
  prepare(slot);
  auto& weight = slot.parameter.tensor;
  if (!weight.device().is_cpu()) {
    if (settings_.kind == OptimizerKind::kSgd) {
      return sgd_step_on_device(weight.detach(), gradient, slot.state, sgd_factors(settings_, scale, rate, first));
    }
    return adam_step_on_device(weight.detach(), gradient, slot.state, adam_factors(settings_, slot.step, scale, rate));
  }
  AT_DISPATCH_FLOATING_TYPES(weight.scalar_type(), "optimizer_step", [&] {
    const auto memory = memory_of<scalar_t>(weight, slot.state, gradient.data_ptr<scalar_t>());
    if (settings_.kind != OptimizerKind::kSgd) {
      adam_step(memory.adam(), weight.numel(), adam_factors(settings_, slot.step, scale, rate));
    } else {
      sgd_step(memory.sgd(), weight.numel(), sgd_factors(settings_, scale, rate, first));
    }
  });
}

void Optimizer::apply_outer(Slot& slot, const ParameterGradient& gradient, double scale, double rate) const {
  const bool first = slot.state.empty();
  prepare(slot);
  const auto memory = memory_of<float>(slot.parameter.tensor, slot.state, nullptr);
  const auto products = outer_products(gradient);
  if (settings_.kind != OptimizerKind::kSgd) {
    adam_step(memory.adam(), products, adam_factors(settings_, slot.step, scale, rate));
  } else {
    sgd_step(memory.sgd(), products, sgd_factors(settings_, scale, rate, first));
  }
}

void Optimizer::move_to(const c10::Device& device) {
  for (auto& slot : slots_) {
    for (auto& tensor : slot.state) tensor = tensor.to(device);
  }
}

std::vector<NamedTensor> Optimizer::state() const {
  std::vector<NamedTensor> all;
  const auto names = state_names();
  for (const auto& slot : slots_) {
    if (slot.step == 0) continue;
    for (std::size_t i = 0; i < slot.state.size(); ++i) {
      all.push_back({slot.parameter.name + "." + names[i], slot.state[i]});
    }
    all.push_back({slot.parameter.name + ".step", at::scalar_tensor(slot.step, at::kLong)});
  }
  return all;
}

Result<void> Optimizer::load_state(std::vector<NamedTensor> state) {
  std::vector<Slot> loaded;
  std::size_t used = 0;
  const auto names = state_names();
  const auto find = [&state](const std::string& name) -> const at::Tensor* {
    for (const auto& item : state) {
      if (item.name == name) return &item.tensor;
    }
    return nullptr;
  };
  for (const auto& slot : slots_) {
    loaded.push_back({slot.parameter, 0, {}});
    const auto* step = find(slot.parameter.name + ".step");
    if (step == nullptr) continue;
    if (step->scalar_type() != at::kLong || step->numel() != 1 || step->item<std::int64_t>() < 1) {
      return invalid("optimizer state " + slot.parameter.name + ".step is no positive int64");
    }
    loaded.back().step = step->item<std::int64_t>();
    ++used;
    for (const auto& name : names) {
      const auto full = slot.parameter.name + "." + name;
      const auto* tensor = find(full);
      if (tensor == nullptr) return invalid("optimizer state " + full + " is missing");
      if (tensor->sizes() != slot.parameter.tensor.sizes() ||
          tensor->scalar_type() != slot.parameter.tensor.scalar_type()) {
        return invalid("optimizer state " + full + " has another shape or dtype than its parameter");
      }
      const auto& parameter = slot.parameter.tensor;
      const bool usable = tensor->is_contiguous() && tensor->device() == parameter.device();
      loaded.back().state.push_back(usable ? *tensor : tensor->to(parameter.device()).contiguous());
      ++used;
    }
  }
  if (used != state.size()) return invalid("the optimizer state has tensors that belong to no parameter");
  slots_ = std::move(loaded);
  return {};
}

}  // namespace dmoe::expert_server
