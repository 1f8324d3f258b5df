// What the suites about slow and failing networks train: one mixture of 16 `ffn` experts on four servers.
#pragma once

#include "bench/server_processes.hpp"
#include "bench/suite.hpp"
#include "dmoe/dmoe.hpp"
#include "testbed/network_relay.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace dmoe::bench::four_servers {

/// Of one step: so many that the steps in flight are more work than fits into the time that they wait for a network.
inline constexpr std::int64_t kRows = 256;
inline constexpr std::int64_t kFeatures = 256;

inline DMoEOptions layer() { return DMoEOptions(kFeatures, {4, 4}, "ffn").k_best(4); }

/// The first `relayed` of them are reached through `relay`. Each computes with one thread unless told otherwise, as
/// README.md advises where several programs share a machine: with half of the servers gone, the others would each take
/// a second core that the other one uses as well.
inline std::vector<expert_server::ServerOptions> servers(const testbed::NetworkRelay& relay, std::size_t relayed,
                                                         const Options& options) {
  auto servers = ffn_servers({"ffn.0.[0:4]", "ffn.1.[0:4]", "ffn.2.[0:4]", "ffn.3.[0:4]"}, kFeatures,
                             options.compute_threads > 0 ? options.compute_threads : 1);
  for (std::size_t i = 0; !options.trace.empty() && i < servers.size(); ++i) {
    servers[i].trace_file = options.trace / ("server" + std::to_string(i) + ".json");
  }
  for (std::size_t i = 0; i < relayed; ++i) servers[i].announce = {{"127.0.0.1", relay.port(i)}};
  return servers;
}

}  // namespace dmoe::bench::four_servers
