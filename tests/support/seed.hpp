// What makes a random test repeatable.
#pragma once

#include <cstdint>

namespace dmoe::test {

/// The run's seed: printed at start, set again with the environment variable DMOE_TEST_SEED.
std::uint64_t seed();

}  // namespace dmoe::test
