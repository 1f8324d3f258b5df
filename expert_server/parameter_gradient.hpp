// The gradient of one parameter of an expert. Private to expert_server/.
#pragma once

#include <ATen/core/Tensor.h>

namespace dmoe::expert_server {

/// Either `dense`, of the parameter's shape; or left^T · right, as a Linear's weight has it after few rows. A product
/// is never written out: reading and writing a gradient of the parameter's size would cost more than computing it
/// again.
struct ParameterGradient {
  at::Tensor dense;  ///< Undefined with the others: the parameter is left alone.
  at::Tensor left;   ///< [rows, outputs] contiguous float32
  at::Tensor right;  ///< [rows, inputs] contiguous float32
};

}  // namespace dmoe::expert_server
