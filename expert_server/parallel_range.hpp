// Splits a loop over the compute threads of the calling thread.
#pragma once

#include <cstdint>
#include <functional>

namespace dmoe::expert_server {

/// Calls `body(begin, end)` for parts of [0, count) of at least `grain` each, on torch's intra-op threads at once;
/// returns when all have ended. Compiled apart because ATen's own is parallel only in files that are compiled with
/// OpenMP, which the precompiled header is not.
/// @pre `body` does not throw.
void parallel_range(std::int64_t count, std::int64_t grain,
                    const std::function<void(std::int64_t begin, std::int64_t end)>& body);

}  // namespace dmoe::expert_server
