// What this trainer learned about servers by calling them. Private to dmoe/.
#pragma once

#include "dht/prefix_resolver.hpp"
#include "gating/ban_list.hpp"
#include "net/endpoint.hpp"
#include "net/error.hpp"
#include "net/expert_uid.hpp"
#include "net/rpc_client.hpp"

#include <boost/asio/io_context.hpp>

#include <chrono>
#include <memory>

namespace dmoe {

/// Turns failures into bans, by what each of them says.
///
/// Refused or reset, at every endpoint: the server is gone, and banned with all its experts.
/// Silent, its calls of a pass unanswered: it hangs or is gone, or one message was lost: calls to a server leave
/// together, so that their number says nothing. It is left out at once and asked for its state. An answer lifts the ban
/// within a round trip; without one it stays. A server that answers such questions but, three times over a second, no
/// calls is stuck, and believed no longer.
/// Bans end by a newer announcement, or by an answer to an `info` call made in the background before the ban would end,
/// so that no training step waits to find out. A single failing expert is banned by itself, for a missing answer only
/// when it goes on missing (see LostCalls). The caller's own mistakes ban nobody. Thread-safe.
class ServerHealth {
 public:
  /// `rpc` and `io` outlive this; probes run on `io`.
  ServerHealth(boost::asio::io_context& io, net::RpcClient& rpc, std::shared_ptr<gating::BanList> bans);
  ~ServerHealth();  ///< Ends probes.

  /// Where to call `server` now: its first endpoint, or the next after one that could not be reached.
  net::Endpoint endpoint_of(const dht::ServerAddress& server) const;

  /// A call of `uid` on `server` was answered.
  void answered(const ExpertUid& uid, const dht::ServerAddress& server);
  /// One call of `uid` on `server` at `endpoint` failed.
  void failed(const ExpertUid& uid, const std::shared_ptr<const dht::ServerAddress>& server,
              const net::Endpoint& endpoint, const Error& error);
  /// Whether anything came from `server` since `time`; what came before its first failure is not known.
  bool heard_since(const dht::ServerAddress& server, std::chrono::steady_clock::time_point time) const;
  /// `server` gave no answer to any of a pass's calls, nor to anybody meanwhile; `uid` was one of them.
  void silent(const ExpertUid& uid, const std::shared_ptr<const dht::ServerAddress>& server);
  /// A call was given up early, because others were answered in the meantime: it may only have been slow.
  /// @param alone its server answered nothing else either.
  void overtaken(const ExpertUid& uid, const std::shared_ptr<const dht::ServerAddress>& server, bool alone);

  const std::shared_ptr<gating::BanList>& bans() const noexcept;

 private:
  class State;
  std::shared_ptr<State> state_;  // Shared: timers and probes in flight hold it weakly.
};

}  // namespace dmoe
