// The value of a directory record: where a server is, and which children of a prefix it hosts. Private to dht.
#pragma once

#include "net/endpoint.hpp"
#include "net/error.hpp"
#include "net/expert_uid.hpp"

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace dmoe::dht {

inline constexpr std::size_t kMaxEndpoints = 8;
inline constexpr std::size_t kMaxHostBytes = 253;  ///< A DNS name.

struct Listing {
  std::vector<net::Endpoint> endpoints;  ///< 1 to 8.
  std::vector<Coordinate> children;      ///< Strictly ascending.
};

/// kInvalidArgument: no or too many endpoints, a host that is empty or too long, or more than fits a record (64 KiB).
Result<std::vector<std::uint8_t>> write_listing(const Listing& listing);

/// Bytes from another publisher: kInvalidArgument unless every count, text and order is right.
Result<Listing> read_listing(std::span<const std::uint8_t> bytes);

}  // namespace dmoe::dht
