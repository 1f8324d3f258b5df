// LayerNorm and ReLU in one pass over memory, there and back.
#pragma once

#include <ATen/core/Tensor.h>

namespace dmoe::expert_server {

/// relu(layer_norm(x)) over the last dimension, in place, without grad.
/// @pre `x` is contiguous float32 on the CPU; `weight` and `bias` are contiguous float32 of its last size.
void layer_norm_relu_(at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double epsilon);

/// What the way back needs of a pass there.
struct NormalizedRelu {
  at::Tensor output;  ///< relu(normalized * weight + bias), [rows, width]
  at::Tensor scales;  ///< 1 / standard deviation, [rows]
};

/// The same for [rows, width], leaving in `x` the normalized values.
NormalizedRelu layer_norm_relu_keeping_(at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                                        double epsilon);

/// Turns `gradient`, with respect to the output of the pass that left `normalized` and `there`, into that with respect
/// to its input. `weight_gradient` and `bias_gradient` [width] receive those of the parameters.
void layer_norm_relu_backward_(at::Tensor& gradient, const at::Tensor& normalized, const NormalizedRelu& there,
                               const at::Tensor& weight, at::Tensor& weight_gradient, at::Tensor& bias_gradient);

}  // namespace dmoe::expert_server
