// A DHT node with its status pages: UDP and TCP on one port number.
#pragma once

#include "cli/io_thread.hpp"

#include "dht/service.hpp"
#include "dht/service_status.hpp"
#include "net/error.hpp"
#include "net/identity.hpp"
#include "net/metrics.hpp"
#include "net/rpc_server.hpp"

#include <atomic>
#include <cstdint>
#include <memory>

namespace dmoe::cli {

/// Owns its I/O thread. Answers GET /healthz, /readyz, /metrics and /api/v1/dht; it hosts no experts, so every call is
/// refused.
class DhtNode {
 public:
  /// Binds both ports (port 0: one that is free for both) and opens the store; joins nobody yet.
  /// kUnavailable: a port is taken, or the data directory is in use; the message says which.
  static Result<std::unique_ptr<DhtNode>> start(const net::Identity& identity, const dht::ServiceOptions& options);
  ~DhtNode();  ///< As stop().
  DhtNode(const DhtNode&) = delete;
  DhtNode& operator=(const DhtNode&) = delete;

  dht::Service& service() noexcept { return *service_; }
  std::uint16_t port() const noexcept { return service_->port(); }
  /// From now on /readyz says so.
  void set_ready() noexcept { ready_.store(true); }
  /// Closes both ports and the store; returns when they are closed. Idempotent.
  void stop();

 private:
  explicit DhtNode(const net::Identity& identity);
  Result<void> bind(const net::Identity& identity, dht::ServiceOptions options);
  void add_routes();

  std::atomic<bool> ready_{false};
  net::Metrics metrics_;
  dht::ServiceStatus status_;
  IoThread io_;  // Ends before what its handlers use, after what runs on it.
  std::unique_ptr<net::RpcServer> http_;
  std::unique_ptr<dht::Service> service_;
};

}  // namespace dmoe::cli
