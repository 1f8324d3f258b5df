// What this trainer learned about servers by calling them. Private to dmoe/.
#pragma once

#include "dht/prefix_resolver.hpp"
#include "gating/ban_list.hpp"
#include "net/endpoint.hpp"
#include "net/error.hpp"
#include "net/expert_uid.hpp"
#include "net/rpc_client.hpp"

#include <boost/asio/io_context.hpp>

#include <memory>

namespace dmoe {

/// Turns failures into bans. An unreachable server is banned with all its experts as soon as none of its endpoints can
/// be reached, a silent one when it missed every call of a pass; both are let in again by a newer announcement, or by
/// answering an `info` call made in the background before the ban would end, so that no training step waits to find
/// out. A single failing expert is banned by itself, for a missing answer only when it goes on missing (see LostCalls).
/// The caller's own mistakes ban nobody. Thread-safe.
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
  /// `server` gave no answer to any of a pass's calls; `uid` was one of them.
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
