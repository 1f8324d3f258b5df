// LayerNorm followed by ReLU, in place.
#pragma once

#include <ATen/core/Tensor.h>

namespace dmoe::expert_server {

/// Overwrites `x` with relu(layer_norm(x, weight, bias)) over its last dimension, row by row while the row is in the
/// cache: a forward pass without grad then neither allocates nor reads an activation twice. Not differentiable.
/// @pre `x` is contiguous, all are float32 on the CPU, `weight` and `bias` have the size of the last dimension.
void layer_norm_relu_(at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double epsilon);

}  // namespace dmoe::expert_server
