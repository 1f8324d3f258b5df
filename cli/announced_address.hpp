// What a server may tell others about where it is.
#pragma once

#include "net/endpoint.hpp"
#include "net/error.hpp"

#include <string>
#include <vector>

namespace dmoe::cli {

/// Numbers, not a name: what a socket can be bound to.
bool is_ip_address(const net::Endpoint& endpoint);
/// "localhost", 127.0.0.0/8, ::1.
bool is_loopback(const net::Endpoint& endpoint);
/// 0.0.0.0 or ::, every address of the machine: good for listening, meaningless to others.
bool is_wildcard(const net::Endpoint& endpoint);

/// The addresses of this machine's interfaces that others might reach, loopback and link-local ones left out.
std::vector<std::string> candidate_addresses();

/// Checks `--listen` with `--announce`. An address is never guessed: in a container or behind a router the guess is
/// wrong and the experts look dead to everyone. kInvalidArgument: a wildcard is to be announced; the message lists
/// the candidates.
Result<std::vector<net::Endpoint>> addresses_to_announce(const net::Endpoint& listen,
                                                         std::vector<net::Endpoint> announce);

/// A line for the user when what is announced cannot be reached from where the initial peers are; else empty.
std::string reachability_warning(const std::vector<net::Endpoint>& announce,
                                 const std::vector<net::Endpoint>& initial_peers);

}  // namespace dmoe::cli
