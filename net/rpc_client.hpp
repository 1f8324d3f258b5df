// Calls to other machines: many in flight per connection, connections pooled per endpoint.
#pragma once

#include "net/endpoint.hpp"
#include "net/error.hpp"
#include "net/rpc_message.hpp"

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace dmoe::net {

struct RpcClientOptions {
  std::size_t max_frame_bytes = kDefaultMaxFrameBytes;  ///< Checked before sending, enforced on receipt.
  std::chrono::milliseconds connect_timeout{3'000};     ///< Dial and handshake; a refusal fails at once.
  std::chrono::milliseconds idle_timeout{120'000};      ///< A connection without calls is closed after this.
  std::chrono::milliseconds keepalive{20'000};          ///< Ping period while open (proxies cut at 60 s).
  std::chrono::milliseconds first_backoff{100};         ///< After a failed dial; doubles, with jitter, …
  std::chrono::milliseconds max_backoff{10'000};        ///< … to this. Calls meanwhile fail at once.
  /// Larger frames use the endpoint's second connection; those up to four times as large the first, while the second is
  /// not open.
  std::size_t bulk_bytes = 256 * 1024;
  /// Per connection, waiting to be sent; beyond it kOverloaded.
  std::size_t max_queued_bytes = 1024UL * 1024 * 1024;
};

/// Identifies one call of one RpcClient.
using CallId = std::uint64_t;

/// One call to be sent.
struct CallSpec {
  /// Writes the call's body. Runs once, inside `start`, on the caller's thread.
  std::function<void(schema::Call::Builder, Attachments&)> fill;
  std::chrono::steady_clock::time_point deadline;
  /// Invoked exactly once, on the client's executor: the reply, the server's error, kDeadlineExceeded,
  /// kUnavailable, kCancelled, or, after `check`, kLost. Must not block.
  std::function<void(Result<IncomingReply>)> on_reply;
};

/// A pool of WebSocket connections. Thread-safe; state lives on one strand of the given executor.
///
/// Bytes: a contiguous tensor is written from its own storage (the WebSocket masking key is zero, see
/// docs/architecture.md); a reply is read into the buffer that its tensors then own.
class RpcClient {
 public:
  /// @param executor of an io_context, or of a strand over one; anything else throws std::invalid_argument.
  RpcClient(boost::asio::any_io_executor executor, RpcClientOptions options = {});
  ~RpcClient();  ///< As stop().
  RpcClient(const RpcClient&) = delete;
  RpcClient& operator=(const RpcClient&) = delete;

  /// Sends all `calls` in one frame. A frame over the cap, or a body that cannot be encoded, fails every call of it
  /// with kInvalidArgument naming the size and the limit.
  std::vector<CallId> start(const Endpoint& endpoint, std::vector<CallSpec> calls);

  /// Gives up a call: `on_reply` gets kCancelled unless it already ran, and the server is told. Unknown ids: no-op.
  void cancel(CallId id);

  /// Asks the servers whether they still have these calls to answer. One that is not theirs to answer any more although
  /// no answer came ends with kLost. Does nothing to calls whose server does not understand the question, or whose
  /// answer to it is lost too: ask again. Unknown ids: no-op.
  void check(std::vector<CallId> ids);

  /// One call, awaited. Cancellation: terminal; cancels the call.
  boost::asio::awaitable<Result<IncomingReply>> call(Endpoint endpoint, std::chrono::steady_clock::time_point deadline,
                                                     std::function<void(schema::Call::Builder, Attachments&)> fill);

  /// Fails what is in flight with kCancelled, closes every connection, refuses new calls. Idempotent. The callbacks run
  /// on the executor as ever, so possibly after this returned and after the client is gone.
  void stop();

 private:
  class Pool;
  std::shared_ptr<Pool> pool_;  // Shared: operations in flight outlive this object.
};

}  // namespace dmoe::net
