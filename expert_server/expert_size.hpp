// How much memory experts will take, before they are made.
#pragma once

#include "expert_server/server.hpp"

#include <cstdint>

namespace dmoe::expert_server {

/// Bytes of weights, gradients and optimizer state of one expert of a built-in architecture; 0: not known (nop, script,
/// or one of the user's).
std::uint64_t estimated_expert_bytes(const ExpertOptions& options);

/// kInvalidArgument with the estimate: `count` such experts are larger than the machine's memory.
Result<void> check_fits_memory(const ExpertOptions& options, std::uint64_t count);

}  // namespace dmoe::expert_server
