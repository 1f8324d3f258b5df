// Unpredictable numbers from the operating system. Private to dht.
#pragma once

#include "dht/environment.hpp"

namespace dmoe::dht {

/// Reads from the system in blocks. Not thread-safe: one per node.
RandomSource secure_random_source();

}  // namespace dmoe::dht
