// Optimizer steps as torch operations, for devices whose memory our own loops cannot reach.
#pragma once

#include "expert_server/optimizer_steps.hpp"

#include <ATen/core/Tensor.h>

#include <vector>

namespace dmoe::expert_server {

/// The squared 2-norm of all defined gradients together, in double; asks the device once.
double squared_norm_on_device(const std::vector<at::Tensor>& gradients);

/// One step of the weight in place, as adam_step and sgd_step of optimizer_steps.hpp take it. On any device.
/// `state`: exp_avg, exp_avg_sq, and max_exp_avg_sq if AMSGrad is on.
void adam_step_on_device(const at::Tensor& weight, const at::Tensor& gradient, const std::vector<at::Tensor>& state,
                         const AdamFactors& factors);
/// `state`: the momentum_buffer, if there is momentum.
void sgd_step_on_device(const at::Tensor& weight, const at::Tensor& gradient, const std::vector<at::Tensor>& state,
                        const SgdFactors& factors);

}  // namespace dmoe::expert_server
