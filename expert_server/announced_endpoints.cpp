#include "expert_server/announced_endpoints.hpp"

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/udp.hpp>

#include <spdlog/spdlog.h>

#include <optional>
#include <string>

namespace dmoe::expert_server {
namespace {

namespace asio = boost::asio;
using asio::ip::udp;

std::optional<asio::ip::address> literal(const std::string& host) {
  boost::system::error_code code;
  auto address = asio::ip::make_address(host, code);
  if (code) return std::nullopt;
  return address;
}

bool is_wildcard(const std::string& host) {
  const auto address = literal(host);
  return host.empty() || (address && address->is_unspecified());
}

std::optional<udp::endpoint> resolve(asio::io_context& io, const net::Endpoint& peer) {
  boost::system::error_code code;
  const auto found = udp::resolver(io).resolve(peer.host, std::to_string(peer.port), code);
  if (code || found.empty()) return std::nullopt;
  return found.begin()->endpoint();
}

/// The local address that packets to `remote` would carry. Connecting a datagram socket sends nothing.
std::optional<asio::ip::address> local_address_towards(asio::io_context& io, const udp::endpoint& remote) {
  boost::system::error_code code;
  udp::socket socket(io);
  socket.open(remote.protocol(), code);
  if (!code) socket.connect(remote, code);
  if (code) return std::nullopt;
  const auto local = socket.local_endpoint(code);
  if (code || local.address().is_unspecified()) return std::nullopt;
  return local.address();
}

/// 192.0.2.1 is reserved for documentation (RFC 5737): the default route leads to it, nothing lives there.
udp::endpoint somewhere_else() { return {asio::ip::make_address("192.0.2.1"), 9}; }

}  // namespace

Result<std::vector<net::Endpoint>> announced_endpoints(const std::vector<net::Endpoint>& given,
                                                       const net::Endpoint& listen, std::uint16_t port,
                                                       const std::vector<net::Endpoint>& initial_peers) {
  asio::io_context io;
  std::optional<udp::endpoint> remote;
  for (const auto& peer : initial_peers) {
    remote = resolve(io, peer);
    if (remote) break;
  }
  const bool peer_is_elsewhere = remote && !remote->address().is_loopback();
  if (!given.empty()) {
    auto endpoints = given;
    for (auto& endpoint : endpoints) {
      if (endpoint.port == 0) endpoint.port = port;
      const auto address = literal(endpoint.host);
      if (peer_is_elsewhere && address && address->is_loopback()) {
        spdlog::warn("{} is announced as told, but other machines cannot reach it", net::to_string(endpoint));
      }
    }
    return endpoints;
  }
  std::string host = listen.host;
  if (is_wildcard(host)) {
    const auto local = local_address_towards(io, remote ? *remote : somewhere_else());
    host = local ? local->to_string() : "127.0.0.1";
    if (!local) spdlog::warn("no network interface found: only this machine can reach the experts");
  }
  const auto address = literal(host);
  if (peer_is_elsewhere && address && address->is_loopback()) {
    return Error{Errc::kInvalidArgument,
                 "this server would announce " + host + ", which the peer " + net::to_string(initial_peers.front()) +
                     " cannot reach: listen on another address, or say with announce (--announce host:port) where "
                     "others reach it",
                 {}};
  }
  return std::vector<net::Endpoint>{{host, port}};
}

net::Endpoint own_endpoint(const net::Endpoint& listen, std::uint16_t port) {
  if (!is_wildcard(listen.host)) return {listen.host, port};
  const auto address = literal(listen.host);
  return {address && address->is_v6() ? "::1" : "127.0.0.1", port};
}

}  // namespace dmoe::expert_server
