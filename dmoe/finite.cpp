#include "dmoe/finite.hpp"

#include <ATen/ATen.h>

#include <cstdint>
#include <cstring>

namespace dmoe {
namespace {

/// Exponent bits all set: Inf or NaN. Integer arithmetic, so that the compiler may use vectors without -ffast-math.
bool all_finite(const float* values, std::int64_t count) {
  std::uint32_t found = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, values + i, sizeof(bits));
    found |= (bits & 0x7F800000U) == 0x7F800000U ? 1U : 0U;
  }
  return found == 0;
}

}  // namespace

bool all_finite(const at::Tensor& tensor) {
  if (!tensor.is_floating_point() || tensor.numel() == 0) return true;
  if (tensor.scalar_type() == at::kFloat && tensor.is_contiguous() && tensor.device().is_cpu()) {
    return all_finite(tensor.data_ptr<float>(), tensor.numel());
  }
  return at::isfinite(tensor).all().item<bool>();
}

}  // namespace dmoe
