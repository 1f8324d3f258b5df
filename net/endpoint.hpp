// Where a peer listens: a host (name or literal) and a port.
#pragma once

#include "net/error.hpp"

#include <compare>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace dmoe::net {

/// `host:port`. One port number serves both UDP (the DHT) and TCP (calls and HTTP).
struct Endpoint {
  std::string host;  ///< Name, IPv4 literal, or IPv6 literal without brackets (a zone such as `%lo` is kept).
  std::uint16_t port = 0;

  friend auto operator<=>(const Endpoint&, const Endpoint&) = default;
};

/// Reads "203.0.113.5:4040", "seed.example:4040", "[::1]:4040", "[fe80::1%lo]:4040".
/// @return kInvalidArgument with the text and the accepted forms.
Result<Endpoint> parse_endpoint(std::string_view text);

/// The form that parse_endpoint reads; IPv6 literals in brackets.
std::string to_string(const Endpoint& endpoint);

}  // namespace dmoe::net

template <>
struct std::hash<dmoe::net::Endpoint> {
  std::size_t operator()(const dmoe::net::Endpoint& endpoint) const noexcept {
    return std::hash<std::string>{}(endpoint.host) * 31 + endpoint.port;
  }
};
