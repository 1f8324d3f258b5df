#include "expert_server/device_steps.hpp"

#include <torch/types.h>
#include <torch/utils.h>

namespace dmoe::expert_server {
namespace {

at::Tensor clipped_and_decayed(const at::Tensor& gradient, const at::Tensor& weight, double scale, double decay) {
  auto used = gradient * scale;
  return decay == 0 ? used : used.add_(weight, decay);
}

}  // namespace

double squared_norm_on_device(const std::vector<at::Tensor>& gradients) {
  at::Tensor squares;
  for (const auto& gradient : gradients) {
    if (!gradient.defined()) continue;
    const auto own = gradient.to(at::kDouble).square().sum();
    squares = squares.defined() ? squares + own : own;
  }
  return squares.defined() ? squares.item<double>() : 0;
}

void adam_step_on_device(const at::Tensor& weight, const at::Tensor& gradient, const std::vector<at::Tensor>& state,
                         const AdamFactors& factors) {
  const auto g = clipped_and_decayed(gradient, weight, factors.scale, factors.coupled_decay);
  state[0].mul_(factors.beta1).add_(g, 1 - factors.beta1);
  state[1].mul_(factors.beta2).addcmul_(g, g, 1 - factors.beta2);
  auto top = state[1];
  if (state.size() > 2) top = at::maximum_out(const_cast<at::Tensor&>(state[2]), state[2], state[1]);
  const auto divisor = top.sqrt().mul_(factors.root_correction).add_(factors.epsilon);
  if (factors.decoupled_decay != 1) weight.mul_(factors.decoupled_decay);
  weight.addcdiv_(state[0], divisor, -factors.step_size);
}

void sgd_step_on_device(const at::Tensor& weight, const at::Tensor& gradient, const std::vector<at::Tensor>& state,
                        const SgdFactors& factors) {
  auto g = clipped_and_decayed(gradient, weight, factors.scale, factors.decay);
  if (!state.empty()) {
    state[0].mul_(factors.first ? 0 : factors.momentum).add_(g);
    g = factors.nesterov ? g.add_(state[0], factors.momentum) : state[0];
  }
  weight.sub_(g, factors.rate);
}

}  // namespace dmoe::expert_server
