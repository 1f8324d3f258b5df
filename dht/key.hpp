// The 256-bit space that keys and nodes share, and its XOR metric.
#pragma once

#include "net/identity.hpp"

#include <array>
#include <compare>
#include <cstdint>
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

/// Whether `a` is closer to `target` than `b` is (Kademlia §2.1: XOR distance).
bool closer(const Bits& a, const Bits& b, const Bits& target) noexcept;

/// Leading bits that `a` and `b` have in common; 256 when equal.
int shared_prefix_bits(const Bits& a, const Bits& b) noexcept;

/// The first 64 bits of the distance: enough to sort by, except between ids forged to collide.
std::uint64_t distance_prefix(const Bits& a, const Bits& b) noexcept;

}  // namespace dmoe::dht

template <>
struct std::hash<dmoe::dht::Key> {
  std::size_t operator()(const dmoe::dht::Key& key) const noexcept {
    std::size_t hash = 0;
    for (std::size_t i = 0; i < sizeof(hash); ++i) hash = (hash << 8U) | key.bytes[i];
    return hash;  // Already uniformly distributed: a SHA-256.
  }
};
