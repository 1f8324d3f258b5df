// Whether numbers are finite, at the speed of memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace dmoe::expert_server {

/// Sum of squares in double, where squares of finite floats cannot overflow: finite exactly when all values are.
double sum_of_squares(const float* values, std::int64_t count) noexcept;
/// For doubles the sum can overflow: a vector of norm above 1e154 counts as not finite.
double sum_of_squares(const double* values, std::int64_t count) noexcept;

/// Whether every element is finite; true for integer and bool tensors. Any strides.
bool all_finite(const at::Tensor& tensor);

}  // namespace dmoe::expert_server
