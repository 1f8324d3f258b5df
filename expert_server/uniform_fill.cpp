#include "expert_server/uniform_fill.hpp"

namespace dmoe::expert_server {
namespace {

std::uint64_t mixed(std::uint64_t state) {
  state = (state ^ (state >> 30U)) * 0xBF58476D1CE4E5B9ULL;
  state = (state ^ (state >> 27U)) * 0x94D049BB133111EBULL;
  return state ^ (state >> 31U);
}

/// 24 bits as a number in [-1, 1).
float centred(std::uint32_t bits) { return static_cast<float>(static_cast<std::int32_t>(bits >> 8U)) * 0x1p-23F - 1; }

}  // namespace

void fill_uniform(float* values, std::int64_t begin, std::int64_t end, std::uint64_t seed, float bound) {
  constexpr std::uint64_t kStep = 0x9E3779B97F4A7C15ULL;
  const auto pair = [&](std::int64_t i) { return mixed(seed + kStep * (static_cast<std::uint64_t>(i) / 2)); };
  const auto low = [&](std::uint64_t bits) { return bound * centred(static_cast<std::uint32_t>(bits)); };
  const auto high = [&](std::uint64_t bits) { return bound * centred(static_cast<std::uint32_t>(bits >> 32U)); };
  auto i = begin;
  if (i < end && i % 2 == 1) {
    values[i] = high(pair(i));
    ++i;
  }
  for (; i + 1 < end; i += 2) {  // Two values share 64 bits.
    const auto bits = pair(i);
    values[i] = low(bits);
    values[i + 1] = high(bits);
  }
  if (i < end) values[i] = low(pair(i));
}

}  // namespace dmoe::expert_server
