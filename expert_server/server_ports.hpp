// One port number for both protocols.
#pragma once

#include "dht/service.hpp"
#include "net/rpc_server.hpp"

#include <functional>
#include <memory>

namespace dmoe::expert_server {

struct ServerPorts {
  std::unique_ptr<net::RpcServer> rpc;  ///< TCP, listening.
  std::unique_ptr<dht::Service> dht;    ///< UDP, bound to the same number.
};

/// Binds TCP and UDP. `make_rpc` makes a server that is ready to listen. With port 0 a number whose UDP side is taken
/// is given back and another one tried; a fixed port that is taken is kUnavailable at once.
Result<ServerPorts> bind_ports(boost::asio::io_context& io, const net::Identity& identity,
                               const dht::ServiceOptions& dht_options,
                               const std::function<std::unique_ptr<net::RpcServer>()>& make_rpc);

}  // namespace dmoe::expert_server
