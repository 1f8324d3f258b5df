#include "expert_server/optimizer.hpp"

#include "expert_server/optimizer_steps.hpp"

#include <torch/types.h>
#include <torch/utils.h>

#include <cmath>
#include <utility>

namespace dmoe::expert_server {
namespace {

Error invalid(std::string message) { return {Errc::kInvalidArgument, std::move(message), {}}; }

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
  if (gradients.size() != slots_.size()) return Error{Errc::kInternal, "a gradient is missing", {}};
  std::vector<at::Tensor> dense(gradients.size());
  double squares = 0;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) continue;
    dense[i] = gradients[i].contiguous();
    squares += squared_norm_of(dense[i]);
  }
  const double norm = std::sqrt(squares);
  if (!std::isfinite(norm)) return invalid("the gradients of the expert's parameters are not finite: NaN or Inf");
  const double limit = settings_.clip_grad_norm;
  const double scale = limit > 0 && norm > limit ? limit / norm : 1.0;
  const double rate = settings_.learning_rate * settings_.schedule.factor(steps);
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (dense[i].defined()) apply(slots_[i], dense[i], scale, rate);
  }
  return norm;
}

void Optimizer::apply(Slot& slot, const at::Tensor& gradient, double scale, double rate) {
  auto& weight = slot.parameter.tensor;
  const bool first = slot.state.empty();
  while (slot.state.size() < state_names().size()) slot.state.push_back(at::zeros_like(weight));
  ++slot.step;
  AT_DISPATCH_FLOATING_TYPES(weight.scalar_type(), "optimizer_step", [&] {
    auto* weights = weight.data_ptr<scalar_t>();
    const auto* gradients = gradient.data_ptr<scalar_t>();
    std::vector<scalar_t*> state;
    for (auto& tensor : slot.state) state.push_back(tensor.data_ptr<scalar_t>());
    if (settings_.kind != OptimizerKind::kSgd) {
      const AdamMemory<scalar_t> memory{weights, gradients, state[0], state[1], settings_.amsgrad ? state[2] : nullptr};
      adam_step(memory, weight.numel(), adam_factors(settings_, slot.step, scale, rate));
    } else {
      const SgdMemory<scalar_t> memory{weights, gradients, state.empty() ? nullptr : state[0]};
      sgd_step(memory, weight.numel(),
               {scale, settings_.weight_decay, rate, settings_.momentum, settings_.nesterov, first});
    }
  });
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

Result<void> Optimizer::load_state(const std::vector<NamedTensor>& state) {
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
      loaded.back().state.push_back(tensor->clone(at::MemoryFormat::Contiguous));
      ++used;
    }
  }
  if (used != state.size()) return invalid("the optimizer state has tensors that belong to no parameter");
  slots_ = std::move(loaded);
  return {};
}

}  // namespace dmoe::expert_server
