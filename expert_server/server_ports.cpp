#include "expert_server/server_ports.hpp"

#include <utility>

namespace dmoe::expert_server {
namespace {

constexpr int kTries = 16;  ///< Port numbers tried; that so many in a row are taken for UDP alone does not happen.

}  // namespace

Result<ServerPorts> bind_ports(boost::asio::io_context& io, const net::Identity& identity,
                               const dht::ServiceOptions& dht_options,
                               const std::function<std::unique_ptr<net::RpcServer>()>& make_rpc) {
  const bool any_port = dht_options.listen.port == 0;
  Error last;
  for (int tries = 0; tries < (any_port ? kTries : 1); ++tries) {
    ServerPorts ports;
    ports.rpc = make_rpc();
    if (auto listening = ports.rpc->listen(); !listening) return listening.error();
    auto options = dht_options;
    options.listen.port = ports.rpc->port();
    auto service = dht::Service::start(io, identity, options);
    if (service) {
      ports.dht = std::move(*service);
      return ports;
    }
    last = service.error();
    if (last.code != Errc::kUnavailable) break;
  }
  return last;
}

}  // namespace dmoe::expert_server
