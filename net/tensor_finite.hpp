// Whether numbers are finite, at the speed of memory.
#pragma once

#include <ATen/core/Tensor.h>

namespace dmoe::net {

/// Whether every element is finite; true for integer and bool tensors. Any strides, any device; contiguous float32 on
/// the CPU is read at the speed of memory, everything else through ATen.
bool all_finite(const at::Tensor& tensor);

}  // namespace dmoe::net
