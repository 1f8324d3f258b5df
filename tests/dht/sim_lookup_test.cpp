#include "tests/sim/world.hpp"

#include "tests/support/catch.hpp"

namespace dmoe::sim {
namespace {

using namespace std::chrono_literals;

dht::StoreRequest request(const std::string& name, const std::string& value, std::chrono::milliseconds ttl = 10min) {
  return {dht::Key::of(name), {}, {value.begin(), value.end()}, ttl, false};
}

std::string text_of(const Result<dht::FindResult>& found) {
  if (!found.has_value() || found->records.empty()) return {};
  const auto& value = found->records.front().record.value;
  return {value.begin(), value.end()};
}

TEST_CASE("A value stored by one node is found by every other", "[dht][sim]") {
  World world(test::seed());
  world.grow(50);
  const auto stored = world.store(world.host(7), request("k", "v"));
  REQUIRE(stored.has_value());
  CHECK(stored->replicas >= 8);
  for (std::size_t i = 0; i < world.size(); ++i) CHECK(text_of(world.find(world.host(i), dht::Key::of("k"))) == "v");
  const auto missing = world.find(world.host(3), dht::Key::of("nothing"));
  REQUIRE(missing.has_value());
  CHECK(missing->records.empty());
}

}  // namespace
}  // namespace dmoe::sim
