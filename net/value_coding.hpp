// Loops that turn float32 values into shorter ones and back. Private to net_tensor; no torch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dmoe::net {

inline constexpr std::size_t kInt8Block = 128;  ///< Values that share a scale.

/// The largest |value|, as IEEE 754 bits, which are ordered as the numbers are. From kInfinityBits on: an Inf or NaN.
std::uint32_t largest_magnitude(const float* values, std::size_t count) noexcept;
inline constexpr std::uint32_t kInfinityBits = 0x7F800000;
inline constexpr std::uint32_t kMostInBfloat16 = 0x7F7F7FFF;  ///< The next rounds to infinity.
inline constexpr std::uint32_t kMostInFloat16 = 0x477FE000;   ///< 65504.
inline constexpr std::uint32_t kMostInInt8 = 0x7F000000;      ///< 2^127: 127 times its scale is surely finite.

// Rounded to nearest, ties to even. @pre no magnitude is above the format's.
void to_float16(const float* values, std::size_t count, std::uint16_t* coded) noexcept;
void to_bfloat16(const float* values, std::size_t count, std::uint16_t* coded) noexcept;
// Any bits: infinities and NaN come out as such.
void from_float16(const std::uint16_t* coded, std::size_t count, float* values) noexcept;
void from_bfloat16(const std::uint16_t* coded, std::size_t count, float* values) noexcept;

inline std::size_t int8_blocks(std::size_t count) noexcept { return (count + kInt8Block - 1) / kInt8Block; }
/// Per block of kInt8Block values, the last perhaps shorter: scale = largest magnitude / 127, value ≈ scale * coded.
/// @pre no magnitude is above kMostInInt8. @param scales int8_blocks(count) of them.
void to_int8(const float* values, std::size_t count, float* scales, std::int8_t* coded) noexcept;
void from_int8(const float* scales, const std::int8_t* coded, std::size_t count, float* values) noexcept;

}  // namespace dmoe::net
