// Seeds of passes. Private to dmoe/.
#pragma once

#include <cstdint>
#include <random>

namespace dmoe {

/// 64 random bits: the same for all calls of a pass and of its backward, another for every other pass.
inline std::uint64_t fresh_seed() {
  thread_local std::mt19937_64 engine{std::random_device{}()};
  return engine();
}

}  // namespace dmoe
