// CPU tensors that live long and are large: weights, what an optimizer keeps, snapshots.
#pragma once

#include <ATen/core/Tensor.h>

namespace dmoe::expert_server {

/// As at::empty, at::zeros for the CPU, in LargeMemory where that is worth it: what one forward pass needs comes and
/// goes too often for memory of its own, but weights are touched first when a server starts, and callers wait for that.
at::Tensor large_empty(at::IntArrayRef sizes, at::ScalarType dtype);
at::Tensor large_zeros(at::IntArrayRef sizes, at::ScalarType dtype);

}  // namespace dmoe::expert_server
