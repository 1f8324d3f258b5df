// Whether numbers are finite. Private to dmoe/.
#pragma once

#include <ATen/core/Tensor.h>

namespace dmoe {

/// Whether every element is finite; true for integer and bool tensors. Contiguous float32 is read at the speed of
/// memory, everything else through ATen.
bool all_finite(const at::Tensor& tensor);

}  // namespace dmoe
