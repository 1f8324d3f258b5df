// Joining, outages, islands, unreachable and hostile nodes.
#include "tests/dht/sim_values.hpp"
#include "tests/sim/liar.hpp"
#include "tests/sim/world.hpp"

#include "tests/support/catch.hpp"

#include <algorithm>

namespace dmoe::sim {
namespace {

using namespace std::chrono_literals;

std::size_t misses(World& world, std::size_t first, std::size_t end) {
  std::size_t count = 0;
  for (std::size_t reader = first; reader < end; ++reader) {
    for (std::size_t writer = first; writer < end; ++writer) {
      if (world.host(reader).runs() && !finds(world, world.host(reader), "of" + std::to_string(writer))) ++count;
    }
  }
  return count;
}

TEST_CASE("Eight nodes started in the same 100 ms form one network", "[dht][sim][b7]") {
  for (std::uint64_t round = 0; round < 50; ++round) {
    World world(test::seed() + round);
    for (std::size_t i = 0; i < 8; ++i) world.add_host();
    for (std::size_t i = 0; i < 8; ++i) {
      // Each is told of one other at random: rings, pairs and chains.
      const std::size_t other = (i + 1 + world.random() % 7) % 8;
      Host& host = world.host(i);
      host.start_node().bootstrap({world.host(other).address}, {}, {});
      world.run_for(10ms);
    }
    // A mapping such as 0-1, 2-3 leaves nobody who knows of both; everyone knows host 0 as well then.
    for (std::size_t i = 1; i < 8; ++i) {
      world.host(i).node().bootstrap({world.host(0).address, world.host((i + 1) % 8).address}, {}, {});
    }
    world.run_for(30s);
    for (std::size_t i = 0; i < 8; ++i)
      REQUIRE(world.store(world.host(i), request("of" + std::to_string(i))).has_value());
    REQUIRE(misses(world, 0, 8) == 0);
  }
}

TEST_CASE("A node that lost the network for two minutes is back within 60 s", "[dht][sim][b8]") {
  World world(test::seed());
  world.grow(20);
  Host& host = world.host(7);
  host.cut_off = true;
  world.run_for(2min);
  host.cut_off = false;
  world.run_for(60s);
  CHECK(host.node().stats().known_nodes >= 10);
  REQUIRE(world.store(host, request("of7")).has_value());
  CHECK(finds(world, world.host(13), "of7"));
}

TEST_CASE("A partition heals and two islands become one network", "[dht][sim][b8]") {
  World world(test::seed());
  world.grow(30);
  for (std::size_t i = 0; i < 15; ++i) world.host(i).island = 1;
  world.run_for(5min);
  for (std::size_t i = 0; i < 15; ++i) world.host(i).island = 0;
  world.run_for(60s);
  for (std::size_t i = 0; i < 30; ++i)
    REQUIRE(world.store(world.host(i), request("of" + std::to_string(i))).has_value());
  CHECK(misses(world, 0, 30) == 0);
}

TEST_CASE("No key of a network with unreachable nodes is lost", "[dht][sim][b19]") {
  World world(test::seed());
  world.grow(6);
  for (int i = 0; i < 4; ++i) {
    Host& host = world.add_host();
    host.behind_nat = true;
    host.start_node({.client_only = true}).bootstrap({world.host(0).address}, {}, {});
    world.run_for(200ms);
  }
  world.run_for(30s);
  for (std::size_t i = 0; i < 10; ++i)
    REQUIRE(world.store(world.host(i), request("of" + std::to_string(i))).has_value());
  CHECK(misses(world, 0, 10) == 0);
  for (std::size_t i = 6; i < 10; ++i) CHECK(world.host(i).store().stats().records == 0);
}

TEST_CASE("A node behind NAT learns that nobody reaches it and others that they are reached", "[dht][sim][b18]") {
  World world(test::seed());
  world.grow(150);
  for (const bool hidden : {true, false}) {
    Host& host = world.add_host();
    host.behind_nat = hidden;
    bool contacted = false;
    std::optional<dht::Reach> reach;
    // Asked at the first contact: whoever is asked to knock is a stranger then.
    host.start_node({.client_only = true}).bootstrap({world.host(0).address}, [&] { contacted = true; }, {});
    REQUIRE(world.run_until([&] { return contacted; }));
    // Only a stranger's knock tells; where an acquaintance happened to be asked to, it is tried again.
    for (int attempt = 0; attempt < 8 && (!reach || *reach == dht::Reach::kUnknown); ++attempt) {
      reach.reset();
      host.node().test_reach(0, [&](dht::Reach result) { reach = result; });
      REQUIRE(world.run_until([&] { return reach.has_value(); }));
    }
    CHECK(*reach == (hidden ? dht::Reach::kUnreachable : dht::Reach::kReachable));
  }
}

TEST_CASE("Ten thousand reads of random keys miss none", "[dht][sim][b11]") {
  World world(test::seed());
  world.grow(64);
  std::vector<dht::StoreRequest> requests;
  for (int i = 0; i < 1'000; ++i) requests.push_back(request("of" + std::to_string(i)));
  for (const auto& stored : world.store_many(world.host(3), std::move(requests))) REQUIRE(stored.has_value());
  std::size_t missed = 0;
  for (int i = 0; i < 10'000; ++i) {
    missed += finds(world, world.host(world.random() % 64), "of" + std::to_string(world.random() % 1'000)) ? 0 : 1;
  }
  CHECK(missed == 0);
}

TEST_CASE("With 10 percent loss and duplicates everything is found", "[dht][sim]") {
  World world(test::seed());
  world.grow(60);
  for (std::size_t i = 0; i < 60; ++i)
    REQUIRE(world.store(world.host(i), request("of" + std::to_string(i))).has_value());
  world.model.loss = 0.1;
  world.model.duplication = 0.05;
  std::size_t missed = 0;
  for (int i = 0; i < 500; ++i) {
    missed += finds(world, world.host(world.random() % 60), "of" + std::to_string(world.random() % 60)) ? 0 : 1;
  }
  CHECK(missed == 0);
}

TEST_CASE("With 30 percent of the nodes just killed everything is found soon", "[dht][sim]") {
  World world(test::seed());
  world.grow(100);
  for (std::size_t i = 0; i < 100; ++i)
    REQUIRE(world.store(world.host(i), request("of" + std::to_string(i))).has_value());
  for (std::size_t i = 0; i < 30; ++i) world.host(3 * i + 1).kill();
  std::size_t missed = 0;
  std::vector<double> times;
  for (int i = 0; i < 300; ++i) {
    Host& reader = world.host(3 * (world.random() % 33));
    const TimePoint start = world.now();
    missed += finds(world, reader, "of" + std::to_string(world.random() % 100)) ? 0 : 1;
    times.push_back(std::chrono::duration<double, std::milli>(world.now() - start).count());
  }
  CHECK(missed == 0);
  std::sort(times.begin(), times.end());
  CHECK(times[times.size() * 99 / 100] <= 800);  // Ten median round trips; virtual time.
}

TEST_CASE("With 20 percent liars records are found", "[dht][sim][f8]") {
  World world(test::seed());
  std::vector<dht::wire::NodeInfo> accomplices;
  std::vector<std::unique_ptr<Liar>> liars;
  world.grow(80);
  for (std::size_t i = 0; i < 80; ++i)
    REQUIRE(world.store(world.host(i), request("of" + std::to_string(i))).has_value());
  for (std::size_t i = 0; i < 16; ++i) {
    Host& host = world.host(5 * i);
    host.kill();
    host.cut_off = false;
    liars.push_back(std::make_unique<Liar>(host, world, accomplices));
    accomplices.push_back(liars.back()->info());
  }
  std::size_t missed = 0;
  for (int i = 0; i < 300; ++i) {
    Host& reader = world.host(5 * (world.random() % 16) + 1);
    missed += finds(world, reader, "of" + std::to_string(world.random() % 80)) ? 0 : 1;
  }
  CHECK(missed <= 3);
}

TEST_CASE("The same seed gives the same run", "[dht][sim]") {
  const auto run = [] {
    World world(7);
    world.model.loss = 0.05;
    world.grow(30);
    std::string trace;
    for (std::size_t i = 0; i < 10; ++i) {
      (void)world.store(world.host(i), request("of" + std::to_string(i)));
      trace += std::to_string(world.datagrams) + "@" + std::to_string(world.now().time_since_epoch().count()) + " ";
    }
    return trace;
  };
  CHECK(run() == run());
}

}  // namespace
}  // namespace dmoe::sim
