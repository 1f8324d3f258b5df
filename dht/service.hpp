// A Kademlia node on a real UDP socket with a real store: what programs start.
#pragma once

#include "dht/expert_directory.hpp"
#include "net/endpoint.hpp"
#include "net/error.hpp"
#include "net/identity.hpp"

#include <boost/asio/io_context.hpp>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace dmoe::dht {

class Node;
struct DialReport;

struct ServiceOptions {
  net::Endpoint listen{"0.0.0.0", 0};              ///< UDP. Port 0: any free one.
  std::vector<net::Endpoint> initial_peers;        ///< Names are resolved again at each attempt. Empty: a first node.
  bool client_only = false;                        ///< Neither stores records nor enters other nodes' tables.
  std::optional<std::filesystem::path> data_dir;   ///< RocksDB lies in `<data_dir>/dht`; none: records in memory.
  std::chrono::milliseconds join_timeout{10'000};  ///< For the first contact; see `join`.
};

struct ServiceStats {
  std::size_t known_nodes = 0;
  std::size_t stored_records = 0;
  std::uint64_t datagrams_sent = 0;
  std::uint64_t datagrams_received = 0;
  std::uint64_t datagrams_refused = 0;  ///< Malformed, over a limit, or with a bad signature.
};

/// Owns the node, its socket and its store, and runs them on one strand of `io`. Thread-safe.
class Service {
 public:
  /// Binds and opens the store; joins nobody yet.
  /// kUnavailable: the port is taken, or the data directory is in use by another process; the message says which.
  static Result<std::unique_ptr<Service>> start(boost::asio::io_context& io, net::Identity identity,
                                                ServiceOptions options);
  ~Service();  ///< As stop().
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  /// Contacts the initial peers and fills the routing table. `handler`: success as soon as one peer answered (at once
  /// when there are none); kUnavailable listing each address with its reason when none did by join_timeout. Either way
  /// it keeps trying in the background. Until then lookups wait for the first contact (at most 5 s); after a failed
  /// join they do not: the node is alone, and stores and finds in what it holds itself.
  void join(std::function<void(Result<void>)> handler);

  std::uint16_t port() const noexcept;
  ExpertDirectory& directory() noexcept;
  Node& node() noexcept;

  /// Whether other nodes reach a TCP port of this machine: see Node::test_dial. Not called when stopped meanwhile.
  void test_dial(std::uint16_t port, std::function<void(DialReport)> handler);

  /// A snapshot, taken on the strand.
  void stats(std::function<void(ServiceStats)> handler);

  /// Cancels lookups, closes the socket and the store; returns when they are closed. Call it from outside the strand,
  /// with `io` running or stopped for good. Idempotent.
  void stop();

 private:
  class Impl;
  explicit Service(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;  // Shared: asynchronous operations in flight outlive this object.
};

}  // namespace dmoe::dht
