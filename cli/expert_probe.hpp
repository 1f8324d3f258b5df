// Which of the announced experts really answer.
#pragma once

#include "dmoe/client.hpp"

#include <chrono>
#include <set>

namespace dmoe::cli {

/// Asks every expert of `experts` for its description, all at once, each at the first of its servers.
/// @return those that answered within `timeout`. A record in the DHT outlives a killed server until its TTL; this does
/// not. Blocks the calling thread.
std::set<ExpertUid> answering_experts(Client& client, const ExpertMap& experts, std::chrono::milliseconds timeout);

}  // namespace dmoe::cli
