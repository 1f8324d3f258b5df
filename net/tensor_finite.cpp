#include "net/tensor_finite.hpp"

#include <ATen/ATen.h>

#include <bit>
#include <cstdint>

namespace dmoe::net {
namespace {

/// Integer arithmetic, so that the compiler may use vectors without -ffast-math: an exponent of all ones is NaN or Inf,
/// and adding one to it carries into the sign bit.
bool floats_finite(const float* values, std::int64_t count) noexcept {
  std::uint32_t carried = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(values[i]);
    carried |= (bits & 0x7F800000U) + 0x00800000U;
  }
  return (carried & 0x80000000U) == 0;
}

}  // namespace

bool all_finite(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0 || !at::isFloatingType(tensor.scalar_type())) return true;
  if (tensor.scalar_type() == at::kFloat && tensor.is_contiguous() && tensor.device().is_cpu()) {
    return floats_finite(tensor.data_ptr<float>(), tensor.numel());
  }
  return at::isfinite(tensor).all().item<bool>();
}

}  // namespace dmoe::net
