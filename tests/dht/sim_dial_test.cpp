// Whether others reach a node's TCP port, and that nobody can have others dialled.
#include "tests/sim/world.hpp"

#include "tests/support/catch.hpp"

namespace dmoe::sim {
namespace {

using namespace std::chrono_literals;

std::optional<dht::DialReport> dial_test(World& world, Host& host, std::uint16_t port = 4040) {
  std::optional<dht::DialReport> report;
  host.node().test_dial(port, [&](dht::DialReport told) { report = std::move(told); });
  world.run_until([&] { return report.has_value(); });
  return report;
}

TEST_CASE("Other nodes tell which TCP address of a server they reach", "[dht][sim][b17][b18]") {
  World world(test::seed());
  world.grow(20);
  Host& server = world.host(7);
  auto report = dial_test(world, server);
  REQUIRE(report.has_value());
  CHECK(report->reached.empty());
  CHECK(report->unreached == std::vector<Address>{server.address});
  server.takes_tcp = true;  // The firewall is opened.
  report = dial_test(world, server);
  REQUIRE(report.has_value());
  CHECK(report->reached == std::vector<Address>{server.address});
  CHECK(report->unreached.empty());
}

TEST_CASE("Helpers that are dead or dial nobody tell nothing", "[dht][sim][b18]") {
  World world(test::seed());
  world.grow(4, 1s, 10s);
  for (std::size_t i = 1; i < 4; ++i) world.host(i).kill();
  const auto report = dial_test(world, world.host(0));
  REQUIRE(report.has_value());
  CHECK(report->reached.empty());
  CHECK(report->unreached.empty());
  Host& alone = world.add_host();
  alone.start_node();
  const auto nothing = dial_test(world, alone);
  REQUIRE(nothing.has_value());
  CHECK(nothing->unreached.empty());
}

TEST_CASE("One of several that gets through is enough", "[dht][sim][b18]") {
  World world(test::seed());
  world.grow(4, 1s, 10s);
  world.host(0).takes_tcp = true;
  // Two helpers may not open connections to anybody.
  world.host(1).node().set_dialler(&world.host(2));
  world.host(2).island = 1;
  const auto report = dial_test(world, world.host(0));
  REQUIRE(report.has_value());
  CHECK(report->reached == std::vector<Address>{world.host(0).address});
  CHECK(report->unreached.empty());
}

TEST_CASE("The time that a dial takes is not taken for a round trip", "[dht][sim]") {
  World world(test::seed());
  world.grow(4, 1s, 10s);
  for (int i = 0; i < 5; ++i) REQUIRE(dial_test(world, world.host(0)).has_value());
  // Had the seconds been counted, a lookup past dead nodes would wait as long for each.
  REQUIRE(world.store(world.host(0), {dht::Key::of("k"), {}, {1}, 10min, false}).has_value());
  world.host(1).kill();
  world.host(2).kill();
  const TimePoint began = world.now();
  REQUIRE(world.find(world.host(0), dht::Key::of("k"), {.quorum = 0, .deadline = {}}).has_value());
  CHECK(world.now() - began < 3s);  // Virtual time.
}

TEST_CASE("A node is dialled at the address that it writes from and a few times a minute", "[dht][sim][f13]") {
  World world(test::seed());
  world.grow(12);
  Host& asker = world.host(3);
  for (int i = 0; i < 60; ++i) {
    REQUIRE(dial_test(world, asker).has_value());
    world.run_for(100ms);
  }
  // Sixty tests with three helpers each: each of the eleven others dials eight times a minute at most.
  CHECK(asker.dialled > 0);
  CHECK(asker.dialled <= 11 * 8 * 5);
  for (std::size_t i = 0; i < world.size(); ++i) {
    if (i != 3) CHECK(world.host(i).dialled == 0);
  }
}

TEST_CASE("Who cannot receive at an address cannot have it dialled", "[dht][sim][f13]") {
  World world(test::seed());
  world.grow(5, 1s, 10s);
  Host& victim = world.add_host();
  // A datagram with the victim's address as its source, and a cookie that it could only guess.
  dht::wire::Message forged;
  forged.sender = victim.signer().public_key();
  forged.cookie = 12'345;
  forged.body = dht::wire::Probe{dht::wire::Probe::Stage::kDial, 4040, 0, {}};
  dht::wire::Buffer buffer;
  for (std::uint64_t i = 0; i < 20; ++i) {
    forged.transaction = i + 1;
    REQUIRE(dht::wire::encode(forged, buffer));
    victim.send(world.host(i % 5).address, buffer.bytes());
  }
  world.run_for(30s);
  CHECK(victim.dialled == 0);
}

}  // namespace
}  // namespace dmoe::sim
