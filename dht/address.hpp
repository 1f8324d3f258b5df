// Where a datagram goes to or came from: an IP address and a UDP port, without any socket type.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>

namespace dmoe::dht {

/// IPv4 addresses are held in their IPv6-mapped form (::ffff:a.b.c.d). Link-local zones are not part of it: such
/// addresses are never named to others.
struct Address {
  std::array<std::uint8_t, 16> ip{};
  std::uint16_t port = 0;

  static Address v4(std::uint32_t ip, std::uint16_t port) noexcept;  ///< `ip` in host order.

  bool is_v4() const noexcept;
  bool is_loopback() const noexcept;
  /// RFC 1918, RFC 4193, RFC 6598, link-local: reachable in some places only.
  bool is_private() const noexcept;
  /// Usable as a unicast destination: neither unspecified, multicast, broadcast nor port 0.
  bool is_unicast() const noexcept;
  bool is_global() const noexcept { return is_unicast() && !is_loopback() && !is_private(); }

  /// The network that one owner easily controls: the /24 (IPv4) or /48 (IPv6), as a number to count by.
  std::uint64_t subnet() const noexcept;
  /// The host, whatever its port; for IPv6 the /64, which one host may hold entirely.
  std::uint64_t host() const noexcept;

  friend auto operator<=>(const Address&, const Address&) = default;
  /// By words, inline: every datagram is looked up by its address several times.
  friend bool operator==(const Address& a, const Address& b) noexcept {
    std::array<std::uint64_t, 2> x;
    std::array<std::uint64_t, 2> y;
    std::memcpy(x.data(), a.ip.data(), 16);
    std::memcpy(y.data(), b.ip.data(), 16);
    return x == y && a.port == b.port;
  }
};

/// "203.0.113.5:4040" or "[2001:db8::1]:4040".
std::string to_string(const Address& address);

/// Whether a node at `source` may name `named` to us: an address of narrower scope than its own would make this node
/// send into its own network on a stranger's word.
bool may_name(const Address& source, const Address& named) noexcept;

}  // namespace dmoe::dht

template <>
struct std::hash<dmoe::dht::Address> {
  std::size_t operator()(const dmoe::dht::Address& address) const noexcept;
};
