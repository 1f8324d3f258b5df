// From a peer's name to its addresses. Private to dht.
#pragma once

#include "dht/address.hpp"
#include "dht/asio_clock.hpp"
#include "net/endpoint.hpp"
#include "net/error.hpp"

#include <functional>
#include <vector>

namespace dmoe::dht {

/// Hands every address of a peer to `done`, once and on the strand, possibly within the call. The error's message is
/// the reason alone: who prints it names the peer.
using Resolve = std::function<void(const net::Endpoint& peer, std::function<void(Result<std::vector<Address>>)> done)>;

/// Literal addresses, and names as this machine resolves them now: nothing is kept. What is under way ends when the
/// last copy is gone.
Resolve system_resolver(const AsioClock::Strand& strand);

}  // namespace dmoe::dht
