// Nodes that others cannot reach.
#include "tests/sim/world.hpp"

#include "tests/support/catch.hpp"

#include <algorithm>

namespace dmoe::sim {
namespace {

using namespace std::chrono_literals;

/// Ten nodes that find out by themselves whether others reach them; four are behind NAT.
void join_ten(World& world) {
  for (std::size_t i = 0; i < 10; ++i) {
    Host& host = world.add_host();
    host.behind_nat = i >= 6;
    std::vector<Address> peers;
    if (i != 0) peers = {world.host(0).address, world.host(i > 3 ? 3 : 0).address};
    host.start_node({.detect_reach = true}).bootstrap(std::move(peers), {}, {});
    world.run_for(1s);
  }
  world.run_for(2min);
}

bool knows(Host& host, Host& other) {
  const auto known = host.node().known_nodes();
  return std::any_of(known.begin(), known.end(), [&](const auto& node) { return node.id == other.node().id(); });
}

TEST_CASE("Nodes behind NAT turn into clients by themselves and the others do not", "[dht][sim][b18][b19]") {
  World world(test::seed());
  join_ten(world);
  for (std::size_t i = 0; i < 10; ++i) {
    CHECK(world.host(i).node().is_client() == (i >= 6));
    for (std::size_t other = 6; other < 10; ++other) CHECK_FALSE(knows(world.host(i), world.host(other)));
  }
  for (std::size_t i = 0; i < 10; ++i) {
    const dht::Key key = dht::Key::of("of" + std::to_string(i));
    REQUIRE(world.store(world.host(i), {key, {}, {1}, 10min, false}).has_value());
  }
  for (std::size_t i = 6; i < 10; ++i) CHECK(world.host(i).store().stats().records == 0);
  std::size_t missed = 0;
  for (std::size_t reader = 0; reader < 10; ++reader) {
    for (std::size_t i = 0; i < 10; ++i) {
      const auto found = world.find(world.host(reader), dht::Key::of("of" + std::to_string(i)));
      missed += found.has_value() && !found->records.empty() ? 0 : 1;
    }
  }
  CHECK(missed == 0);
}

TEST_CASE("A client becomes a full node again when it is reached", "[dht][sim][b18]") {
  World world(test::seed());
  join_ten(world);
  Host& host = world.host(7);
  REQUIRE(host.node().is_client());
  bool told = false;
  host.node().on_reach(
      [&](dht::Reach reach, const std::optional<Address>&) { told = reach == dht::Reach::kReachable; });
  host.behind_nat = false;
  for (std::size_t i = 0; i < 3; ++i) {  // Newcomers that it has not written to: they can tell.
    world.add_host().start_node().bootstrap({world.host(0).address}, {}, {});
  }
  CHECK(world.run_until([&] { return told; }, 4h));
  CHECK_FALSE(host.node().is_client());
  world.run_for(2min);
  CHECK(knows(world.host(0), host));
}

TEST_CASE("A first node and a second one do not take each other for unreachable", "[dht][sim][b18]") {
  World world(test::seed());
  for (std::size_t i = 0; i < 2; ++i) {
    std::vector<Address> peers;
    if (i != 0) peers = {world.host(0).address};
    world.add_host().start_node({.detect_reach = true}).bootstrap(std::move(peers), {}, {});
  }
  world.run_for(30s);
  CHECK_FALSE(world.host(0).node().is_client());
  CHECK_FALSE(world.host(1).node().is_client());
  CHECK(knows(world.host(0), world.host(1)));
}

TEST_CASE("A helper that died does not make a newcomer a client", "[dht][sim][b18]") {
  World world(test::seed());
  world.grow(3, 1s, 10s);
  world.host(1).kill();
  world.host(2).kill();
  world.add_host().start_node({.detect_reach = true}).bootstrap({world.host(0).address}, {}, {});
  world.run_for(30s);
  CHECK_FALSE(world.host(3).node().is_client());
  CHECK(knows(world.host(0), world.host(3)));
}

TEST_CASE("A node that becomes a client hands its records on and leaves the tables", "[dht][sim][b19]") {
  World world(test::seed());
  world.grow(5, 1s, 10s);
  REQUIRE(world.store(world.host(0), {dht::Key::of("k"), {}, {7}, 2min, false}).has_value());
  for (std::size_t i = 0; i < 8; ++i) {
    world.add_host().start_node().bootstrap({world.host(0).address}, {}, {});
  }
  world.run_for(1min);
  // All that held it at first leave.
  for (std::size_t i = 0; i < 5; ++i) world.host(i).node().set_client(true);
  world.run_for(10s);
  const auto found = world.find(world.host(12), dht::Key::of("k"));
  REQUIRE(found.has_value());
  CHECK(found->records.size() == 1);
  world.run_for(90s);
  for (std::size_t i = 5; i < 13; ++i) {
    for (std::size_t left = 0; left < 5; ++left) CHECK_FALSE(knows(world.host(i), world.host(left)));
  }
}

}  // namespace
}  // namespace dmoe::sim
