#include "expert_server/finite.hpp"

#include <torch/types.h>

#include <bit>
#include <cmath>

namespace dmoe::expert_server {
namespace {

constexpr std::int64_t kLanes = 8;  ///< Independent sums, so that the compiler may keep them in vector registers.

template <class T>
double strided_sum(const T* values, std::int64_t count) noexcept {
  double lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      const double value = static_cast<double>(values[i + lane]);
      lanes[lane] += value * value;
    }
  }
  for (; i < count; ++i) lanes[0] += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

/// Integer arithmetic: an exponent of all ones is NaN or Inf. Adding one to it carries into the sign bit.
bool floats_finite(const float* values, std::int64_t count) noexcept {
  std::uint32_t carried = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(values[i]);
    carried |= (bits & 0x7F800000U) + 0x00800000U;
  }
  return (carried & 0x80000000U) == 0;
}

}  // namespace

double sum_of_squares(const float* values, std::int64_t count) noexcept { return strided_sum(values, count); }
double sum_of_squares(const double* values, std::int64_t count) noexcept { return strided_sum(values, count); }

bool all_finite(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0 || !at::isFloatingType(tensor.scalar_type())) return true;
  if (tensor.scalar_type() == at::kFloat && tensor.is_contiguous()) {
    return floats_finite(tensor.data_ptr<float>(), tensor.numel());
  }
  return at::isfinite(tensor).all().item<bool>();
}

}  // namespace dmoe::expert_server
