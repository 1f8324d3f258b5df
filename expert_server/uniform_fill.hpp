// Random numbers that do not depend on who draws them.
#pragma once

#include <cstdint>

namespace dmoe::expert_server {

/// values[i] for begin <= i < end: uniform in [-bound, bound), a function of `seed` and i alone (SplitMix64, Steele,
/// Lea and Flood 2014, over the index), so that any division of an array among threads gives the same numbers.
void fill_uniform(float* values, std::int64_t begin, std::int64_t end, std::uint64_t seed, float bound);

}  // namespace dmoe::expert_server
