// How tensors may travel to which server. Private to dmoe/.
#pragma once

#include "dht/prefix_resolver.hpp"
#include "net/compression.hpp"
#include "net/endpoint.hpp"
#include "net/expert_uid.hpp"
#include "net/rpc_client.hpp"

#include <memory>

namespace dmoe {

/// Servers say in an expert's `info` which compressions they read; older ones do not, and get none. Each server is
/// asked once, in the background, and again after a while, since it may come back as another version. Thread-safe.
class ServerFormats {
 public:
  explicit ServerFormats(net::RpcClient& rpc);  ///< `rpc` outlives this.

  /// `wanted` if the server is known to read it, else kNone. No call waits to find out: the first ones to a server are
  /// not compressed.
  Compression choose(const ExpertUid& uid, const dht::ServerAddress& server, const net::Endpoint& endpoint,
                     Compression wanted);

 private:
  class State;
  net::RpcClient& rpc_;
  std::shared_ptr<State> state_;  // Shared: questions in flight hold it weakly.
};

}  // namespace dmoe
