// The linear layers of experts, there and back, by whatever is fastest for the rows at hand.
#pragma once

#include <ATen/core/Tensor.h>

namespace dmoe::expert_server {

/// x @ weight^T + bias, as at::linear, differentiable. Few rows are multiplied by few_rows.hpp, many by
/// matrix_product.hpp; what is not float32 on the CPU by torch.
/// @param x  [..., inputs]    @pre `weight` [outputs, inputs] and `bias` [outputs] are contiguous.
at::Tensor apply_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

/// gradient @ weight, the way back to the layer's input, without grad.    @param gradient  [rows, outputs]
at::Tensor apply_linear_backward(const at::Tensor& gradient, const at::Tensor& weight);

}  // namespace dmoe::expert_server
