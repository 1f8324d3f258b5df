// Serves calls and plain HTTP on one TCP port.
#pragma once

#include "net/endpoint.hpp"
#include "net/error.hpp"
#include "net/frame_budget.hpp"
#include "net/rpc_message.hpp"

#include <boost/asio/io_context.hpp>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>

namespace dmoe::net {

class Metrics;

/// One call that awaits its answer. Movable, not copyable. `reply` and `fail` may be called from any thread, one of
/// them once; a call destroyed unanswered is answered with kInternal.
class IncomingCall {
 public:
  struct State;
  explicit IncomingCall(std::shared_ptr<State> state);
  IncomingCall(IncomingCall&&) noexcept;
  IncomingCall& operator=(IncomingCall&&) noexcept;
  ~IncomingCall();

  schema::Call::Reader reader() const;
  std::shared_ptr<const void> frame() const;               ///< Owner of the bytes that `reader()` points into.
  bool frame_is_counted() const noexcept;                  ///< By the server's `frame_budget`.
  std::chrono::steady_clock::time_point deadline() const;  ///< time_point::max() when the caller set none.
  /// True once the caller cancelled or its connection closed. Thread-safe; check before expensive work.
  bool cancelled() const noexcept;
  const std::string& caller() const;  ///< Remote address, for logs.

  /// `fill` runs inside this call, on this thread. A reply over the frame cap becomes an error that names the limit.
  void reply(const std::function<void(schema::Reply::Builder, Attachments&)>& fill);
  void fail(const Error& error);

 private:
  std::shared_ptr<State> state_;  // Shared with the connection, which marks it cancelled.
};

struct HttpResponse {
  unsigned status = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body;
};

struct RpcServerOptions {
  Endpoint listen{"127.0.0.1", 0};  ///< Port 0: any free one; see RpcServer::port().
  std::size_t max_frame_bytes = kDefaultMaxFrameBytes;
  std::size_t max_connections = 4'096;                  ///< Beyond it the oldest idle one is closed, else refused.
  std::size_t max_calls_per_connection = 1'024;         ///< In flight; beyond it kOverloaded at once.
  std::chrono::milliseconds handshake_timeout{10'000};  ///< A client that connects and says nothing is dropped.
  std::chrono::milliseconds idle_timeout{120'000};      ///< Without frame or pong.
  std::size_t max_http_body_bytes = 64UL * 1024;        ///< Of a request; routes take none today.
  /// Asked before the memory of a frame over 8 KiB is committed; it counts the frame until nobody uses its bytes. While
  /// there is no memory the connection is not read, so that its sender waits too; after `frame_patience` the frame's
  /// calls are answered with the budget's error. Null: max_frame_bytes per connection is the only bound.
  std::shared_ptr<FrameBudget> frame_budget;
  std::chrono::milliseconds frame_patience{2'000};
  /// A frame that holds memory must get on by 1 MiB in each such period, or its sender loses the connection.
  std::chrono::milliseconds arrival_timeout{10'000};
  /// Counts connections, calls by outcome and bytes when set; outlives the server and its io_context.
  Metrics* metrics = nullptr;
};

/// Accepts connections. A GET is answered by the route of its exact path; an upgrade becomes a call connection.
/// Malformed bytes cost the sender its connection, never the process. Runs on the given io_context, whose threads
/// are the caller's; handlers run there and must not block. Handlers may run until `stop` has called its `done`; the
/// io_context outlives the server and every IncomingCall.
class RpcServer {
 public:
  using CallHandler = std::function<void(IncomingCall)>;
  using HttpHandler = std::function<HttpResponse()>;

  RpcServer(boost::asio::io_context& io, RpcServerOptions options, CallHandler on_call);
  ~RpcServer();  ///< As stop().
  RpcServer(const RpcServer&) = delete;
  RpcServer& operator=(const RpcServer&) = delete;

  /// Before `listen`. `path` is exact: "/healthz".
  void route(std::string path, HttpHandler handler);

  /// Binds and starts to accept. kUnavailable: the port is taken; the message names it and what to do.
  Result<void> listen();
  std::uint16_t port() const noexcept;  ///< The bound port; 0 before `listen`.

  /// Stops accepting connections and refuses new calls with kUnavailable, so that callers move on at once; calls in
  /// progress may still be answered until `stop`. HTTP requests on open connections are still served.
  void stop_accepting();
  /// Marks what is in progress cancelled, closes every connection after its queued replies are written, at most
  /// `grace` from now; then calls `done` on the io_context. Idempotent: of several calls the shortest grace counts, and
  /// each `done` is called.
  void stop(std::chrono::milliseconds grace = std::chrono::milliseconds{0}, std::function<void()> done = {});

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;  // Shared: sessions in flight outlive this object.
};

}  // namespace dmoe::net
