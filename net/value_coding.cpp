#include "net/value_coding.hpp"

#include <algorithm>
#include <bit>
#include <limits>

namespace dmoe::net {
namespace {

// Everything here is free of branches and of calls, so that the compiler may use vectors.

std::uint32_t magnitude(float value) noexcept { return std::bit_cast<std::uint32_t>(value) & 0x7FFFFFFFU; }

/// Below it a block is sent as zeros: its scale would be subnormal, and one over it infinite.
constexpr float kSmallestInt8Block = 127 * std::numeric_limits<float>::min();

/// Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the sum.
constexpr float kRounder = 12'582'912.0F;

void block_to_int8(const float* values, std::size_t count, float& scale, std::int8_t* coded) noexcept {
  const float largest = std::bit_cast<float>(largest_magnitude(values, count));
  scale = largest < kSmallestInt8Block ? 0.0F : largest / 127;
  const float inverse = scale > 0 ? 127 / largest : 0.0F;
  for (std::size_t i = 0; i < count; ++i) {
    const auto sum = std::bit_cast<std::int32_t>(values[i] * inverse + kRounder);
    coded[i] = static_cast<std::int8_t>(sum - std::bit_cast<std::int32_t>(kRounder));
  }
}

}  // namespace

std::uint32_t largest_magnitude(const float* values, std::size_t count) noexcept {
  // Signed: the magnitudes have no sign bit, and that comparison is what old vector units have.
  std::int32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) largest = std::max(largest, static_cast<std::int32_t>(magnitude(values[i])));
  return static_cast<std::uint32_t>(largest);
}

void to_float16(const float* values, std::size_t count, std::uint16_t* coded) noexcept {
  constexpr std::int32_t kSmallestNormal = 0x38800000;   // 2^-14
  constexpr std::uint32_t kRebias = (127 - 15) << 23U;   // Of the exponent.
  constexpr std::uint32_t kSubnormalMagic = 0x3F000000;  // 0.5: its last place is float16's smallest number.
  for (std::size_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(values[i]);
    const auto size = bits & 0x7FFFFFFFU;
    const std::uint32_t normal = (size - kRebias + 0xFFFU + (size >> 13U & 1U)) >> 13U;
    const std::uint32_t subnormal =
        std::bit_cast<std::uint32_t>(std::bit_cast<float>(size) + std::bit_cast<float>(kSubnormalMagic)) -
        kSubnormalMagic;
    const std::uint32_t half = static_cast<std::int32_t>(size) < kSmallestNormal ? subnormal : normal;
    coded[i] = static_cast<std::uint16_t>(half | (bits >> 16U & 0x8000U));
  }
}

void to_bfloat16(const float* values, std::size_t count, std::uint16_t* coded) noexcept {
  for (std::size_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(values[i]);
    coded[i] = static_cast<std::uint16_t>((bits + 0x7FFFU + (bits >> 16U & 1U)) >> 16U);
  }
}

void from_float16(const std::uint16_t* coded, std::size_t count, float* values) noexcept {
  constexpr std::uint32_t kTwoTo112 = (127 + 112) << 23U;  // The difference of the exponents' biases.
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t half = coded[i];
    const std::uint32_t size = half & 0x7FFFU;
    // The multiplication also makes float16's subnormal numbers normal.
    const float scaled = std::bit_cast<float>(size << 13U) * std::bit_cast<float>(kTwoTo112);
    const std::uint32_t special = static_cast<std::int32_t>(size) >= 0x7C00 ? kInfinityBits : 0U;
    values[i] = std::bit_cast<float>(std::bit_cast<std::uint32_t>(scaled) | special | (half & 0x8000U) << 16U);
  }
}

void from_bfloat16(const std::uint16_t* coded, std::size_t count, float* values) noexcept {
  for (std::size_t i = 0; i < count; ++i) values[i] = std::bit_cast<float>(static_cast<std::uint32_t>(coded[i]) << 16U);
}

void to_int8(const float* values, std::size_t count, float* scales, std::int8_t* coded) noexcept {
  const std::size_t whole = count / kInt8Block;
  for (std::size_t i = 0; i < whole; ++i) {
    block_to_int8(values + i * kInt8Block, kInt8Block, scales[i], coded + i * kInt8Block);
  }
  const std::size_t done = whole * kInt8Block;
  if (done < count) block_to_int8(values + done, count - done, scales[whole], coded + done);
}

void from_int8(const float* scales, const std::int8_t* coded, std::size_t count, float* values) noexcept {
  for (std::size_t first = 0; first < count; first += kInt8Block) {
    const float scale = scales[first / kInt8Block];
    const std::size_t end = std::min(count, first + kInt8Block);
    for (std::size_t i = first; i < end; ++i) values[i] = scale * static_cast<float>(coded[i]);
  }
}

}  // namespace dmoe::net
