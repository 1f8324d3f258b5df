// What a trainer asks of the DHT: who is alive below a UID prefix.
#pragma once

#include "net/endpoint.hpp"
#include "net/error.hpp"
#include "net/expert_uid.hpp"
#include "net/identity.hpp"

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

namespace dmoe::dht {

/// One server as its records describe it.
struct ServerAddress {
  net::PeerId peer;
  std::vector<net::Endpoint> endpoints;  ///< In the server's order of preference; at least one.
  std::uint64_t announced = 0;           ///< The record's sequence number: a larger one is a newer heartbeat.
};

/// The live children of one UID prefix.
struct PrefixListing {
  struct Child {
    Coordinate coordinate = 0;
    /// Who hosts it (or something below it), the deterministic owner (smallest peer ID) first; at least one.
    std::vector<std::shared_ptr<const ServerAddress>> servers;
  };

  std::vector<Child> children;                    ///< Ascending by coordinate; empty: nothing lives below the prefix.
  std::chrono::steady_clock::time_point expires;  ///< When the earliest of its records does; for an empty listing, now.
};

/// Lists prefixes. Implemented by ExpertDirectory over the DHT. Thread-safe.
class PrefixResolver {
 public:
  using Handler = std::function<void(std::vector<Result<PrefixListing>>)>;

  virtual ~PrefixResolver() = default;

  /// Looks all `prefixes` up together (one shared walk). `handler` gets one result per prefix, in their order, exactly
  /// once, on the resolver's own thread, by `deadline`; it must not block. A prefix without live records is an empty
  /// listing, not an error; kDeadlineExceeded: the DHT did not answer in time.
  virtual void list(std::vector<ExpertPrefix> prefixes, std::chrono::steady_clock::time_point deadline,
                    Handler handler) = 0;
};

}  // namespace dmoe::dht
