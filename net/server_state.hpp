// What the sessions of one server share.
#pragma once

#include "net/link.hpp"
#include "net/rpc_server.hpp"

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace prometheus {
class Counter;
class Gauge;
}  // namespace prometheus

namespace dmoe::net {

class Session;

/// Counters of one server; all null without a registry.
struct ServerCounters {
  explicit ServerCounters(Metrics* metrics);

  static void add(prometheus::Counter* counter, double amount = 1);
  void count_outcome(const Error* error) const;  ///< Null: answered.
  void count_connections(int change) const;

  prometheus::Counter* accepted = nullptr;
  prometheus::Counter* refused = nullptr;
  prometheus::Counter* bytes_in = nullptr;
  prometheus::Counter* bytes_out = nullptr;
  prometheus::Counter* malformed = nullptr;
  prometheus::Counter* http_requests = nullptr;
  prometheus::Gauge* open = nullptr;
  prometheus::Counter* answered = nullptr;
  prometheus::Counter* cancelled = nullptr;
  std::map<Errc, prometheus::Counter*> failed;
};

/// Options, handlers and the list of open sessions. Shared by the server and its sessions, which may outlive it.
struct ServerState {
  ServerState(RpcServerOptions server_options, RpcServer::CallHandler handler)
      : options(std::move(server_options)), on_call(std::move(handler)), counters(options.metrics) {}

  /// @return false when the server is full and no session is idle: the connection is to be dropped.
  bool admit(const std::shared_ptr<Session>& session);
  void forget(const Session* session);
  std::vector<std::shared_ptr<Session>> sessions() const;
  /// Calls `done` once no session is open: now, or when the last one is forgotten.
  void when_empty(std::function<void()> done);

  const RpcServerOptions options;
  const RpcServer::CallHandler on_call;
  const ServerCounters counters;
  std::map<std::string, RpcServer::HttpHandler, std::less<>> routes;  ///< Set before `listen`, read-only after.
  std::atomic<bool> draining{false};                                  ///< New calls are refused.
  std::atomic<bool> stopped{false};  ///< So are HTTP requests: what the routes look at may be gone.

 private:
  std::shared_ptr<Session> oldest_idle() const;
  bool is_full() const;

  mutable std::mutex mutex_;  // Leaf; guards the two below.
  std::unordered_map<const Session*, std::weak_ptr<Session>> sessions_;
  std::vector<std::function<void()>> when_empty_;
};

}  // namespace dmoe::net
