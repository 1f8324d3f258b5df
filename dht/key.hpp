// The 256-bit space that keys and nodes share, and its XOR metric.
#pragma once

#include "net/identity.hpp"

#include <array>
#include <bit>
#include <compare>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string_view>

namespace dmoe::dht {

using NodeId = net::PeerId;                 ///< SHA-256 of the node's public key.
using Bits = std::array<std::uint8_t, 32>;  ///< A point of the space, most significant byte first.

/// Where records lie. A type of its own: a key is chosen freely, a NodeId is proven.
struct Key {
  Bits bytes{};

  /// SHA-256 of `name`.
  static Key of(std::string_view name) noexcept;

  friend auto operator<=>(const Key&, const Key&) = default;
};

/// Eight bytes of `bits`, most significant first.
inline std::uint64_t word_of(const Bits& bits, std::size_t index) noexcept {
  std::uint64_t value = 0;
  std::memcpy(&value, bits.data() + index * 8, 8);
  if constexpr (std::endian::native == std::endian::little) value = __builtin_bswap64(value);
  return value;
}

/// Whether both are the same point. Inline: tables and walks search their lists with it.
inline bool same(const Bits& a, const Bits& b) noexcept {
  return word_of(a, 0) == word_of(b, 0) && word_of(a, 1) == word_of(b, 1) && word_of(a, 2) == word_of(b, 2) &&
         word_of(a, 3) == word_of(b, 3);
}

/// Whether `a` is closer to `target` than `b` is (Kademlia §2.1: XOR distance).
inline bool closer(const Bits& a, const Bits& b, const Bits& target) noexcept {
  for (std::size_t i = 0; i < 4; ++i) {
    const std::uint64_t to_a = word_of(a, i) ^ word_of(target, i);
    const std::uint64_t to_b = word_of(b, i) ^ word_of(target, i);
    if (to_a != to_b) return to_a < to_b;
  }
  return false;
}

/// Leading bits that `a` and `b` have in common; 256 when equal.
inline int shared_prefix_bits(const Bits& a, const Bits& b) noexcept {
  for (std::size_t i = 0; i < 4; ++i) {
    const std::uint64_t difference = word_of(a, i) ^ word_of(b, i);
    if (difference != 0) return static_cast<int>(i) * 64 + std::countl_zero(difference);
  }
  return 256;
}

/// The first 64 bits of the distance: enough to sort by, except between ids forged to collide.
inline std::uint64_t distance_prefix(const Bits& a, const Bits& b) noexcept { return word_of(a, 0) ^ word_of(b, 0); }

}  // namespace dmoe::dht

template <>
struct std::hash<dmoe::dht::Key> {
  std::size_t operator()(const dmoe::dht::Key& key) const noexcept {
    std::size_t hash = 0;
    for (std::size_t i = 0; i < sizeof(hash); ++i) hash = (hash << 8U) | key.bytes[i];
    return hash;  // Already uniformly distributed: a SHA-256.
  }
};
