// A DHT node for the time of one command.
#pragma once

#include "cli/io_thread.hpp"

#include "dht/address.hpp"
#include "dht/blocking.hpp"
#include "dht/service.hpp"
#include "net/endpoint.hpp"
#include "net/error.hpp"
#include "net/identity.hpp"

#include <chrono>
#include <memory>
#include <optional>
#include <vector>

namespace dmoe::cli {

/// Asks and publishes, but neither holds records nor enters other nodes' tables. Its methods wait, on the caller's
/// thread; it owns the thread that works.
class DhtClient {
 public:
  /// Opens a socket on any port, for IPv6 too where the machine has it. `timeout`: for the join and for each search.
  static Result<std::unique_ptr<DhtClient>> start(const net::Identity& identity,
                                                  std::vector<net::Endpoint> initial_peers,
                                                  std::chrono::milliseconds timeout);

  /// kUnavailable: no initial peer answered in time; the message lists each with its reason.
  Result<void> join();
  Result<dht::StoreReport> store(dht::StoreRequest request);
  /// Asks every holder that it finds, and no caches on the way: what is returned is complete and current.
  Result<dht::FindResult> find_all(const dht::Key& key);
  /// Asks at all of a node's addresses at once, and again until the timeout; the first answer counts. @pre not empty
  Result<dht::PingReport> ping(const std::vector<dht::Address>& addresses);
  /// Nodes that answered a search for this client's own place; at most 8.
  std::size_t count_nearest();
  dht::ServiceStats stats();

 private:
  DhtClient() = default;
  Result<dht::PingReport> ping_once(const std::vector<dht::Address>& addresses);
  dht::BlockingDht node() { return dht::BlockingDht(service_->node()); }

  IoThread io_;  // Outlives the service that runs on it.
  std::unique_ptr<dht::Service> service_;
  std::chrono::milliseconds timeout_{0};
};

/// The addresses of a host, by name or literal. kUnavailable: the name has none; the message names it.
Result<std::vector<dht::Address>> resolve(const net::Endpoint& endpoint);

}  // namespace dmoe::cli
