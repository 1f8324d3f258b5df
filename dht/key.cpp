#include "dht/key.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

namespace dmoe::dht {
namespace {

std::uint64_t word(const Bits& bits, std::size_t index) noexcept {
  std::uint64_t value = 0;
  std::memcpy(&value, bits.data() + index * 8, 8);
  if constexpr (std::endian::native == std::endian::little) value = __builtin_bswap64(value);
  return value;
}

}  // namespace

Key Key::of(std::string_view name) noexcept {
  return Key{net::sha256({reinterpret_cast<const std::uint8_t*>(name.data()), name.size()})};
}

bool closer(const Bits& a, const Bits& b, const Bits& target) noexcept {
  for (std::size_t i = 0; i < 4; ++i) {
    const std::uint64_t to_a = word(a, i) ^ word(target, i);
    const std::uint64_t to_b = word(b, i) ^ word(target, i);
    if (to_a != to_b) return to_a < to_b;
  }
  return false;
}

int shared_prefix_bits(const Bits& a, const Bits& b) noexcept {
  for (std::size_t i = 0; i < 4; ++i) {
    const std::uint64_t difference = word(a, i) ^ word(b, i);
    if (difference != 0) return static_cast<int>(i) * 64 + std::countl_zero(difference);
  }
  return 256;
}

std::uint64_t distance_prefix(const Bits& a, const Bits& b) noexcept { return word(a, 0) ^ word(b, 0); }

}  // namespace dmoe::dht
