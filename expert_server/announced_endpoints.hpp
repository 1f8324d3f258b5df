// The address that others are told to call.
#pragma once

#include "net/endpoint.hpp"
#include "net/error.hpp"

#include <cstdint>
#include <vector>

namespace dmoe::expert_server {

/// `given`, with port 0 replaced by `port`; when it is empty, the listening address, and when that is a wildcard, the
/// address of the interface that leads to the first initial peer (or, without one, to the internet). Sends nothing, but
/// resolves names: not on an io thread.
/// kInvalidArgument: a loopback address was derived although an initial peer is on another machine.
Result<std::vector<net::Endpoint>> announced_endpoints(const std::vector<net::Endpoint>& given,
                                                       const net::Endpoint& listen, std::uint16_t port,
                                                       const std::vector<net::Endpoint>& initial_peers);

/// Where a server that listens at `listen` reaches itself.
net::Endpoint own_endpoint(const net::Endpoint& listen, std::uint16_t port);

}  // namespace dmoe::expert_server
