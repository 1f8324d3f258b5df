// Records as the tests in the simulated network store and read them.
#pragma once

#include "tests/sim/world.hpp"

#include <chrono>
#include <string>

namespace dmoe::sim {

inline dht::StoreRequest request(const std::string& name, const std::string& value,
                                 std::chrono::milliseconds ttl = std::chrono::minutes(10),
                                 const std::string& subkey = {}) {
  return {dht::Key::of(name), subkey, {value.begin(), value.end()}, ttl, false};
}

/// A record whose value is its name.
inline dht::StoreRequest request(const std::string& name, std::chrono::milliseconds ttl = std::chrono::hours(1)) {
  return request(name, name, ttl);
}

/// The value of the first record found; empty where there is none.
inline std::string text_of(const Result<dht::FindResult>& found) {
  if (!found.has_value() || found->records.empty()) return {};
  const auto& value = found->records.front().record.value;
  return {value.begin(), value.end()};
}

inline bool finds(World& world, Host& from, const std::string& name) {
  const auto found = world.find(from, dht::Key::of(name));
  return found.has_value() && !found->records.empty();
}

}  // namespace dmoe::sim
