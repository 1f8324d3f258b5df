#include "tests/dht/sim_values.hpp"
#include "tests/sim/world.hpp"

#include "tests/support/catch.hpp"

namespace dmoe::sim {
namespace {

using namespace std::chrono_literals;

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
