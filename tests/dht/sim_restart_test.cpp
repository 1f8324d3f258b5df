// Restarts, renewals, and what follows its key to new holders.
#include "dht/expert_directory.hpp"
#include "tests/dht/sim_values.hpp"
#include "tests/sim/world.hpp"

#include "tests/support/catch.hpp"

#include <algorithm>

namespace dmoe::sim {
namespace {

using namespace std::chrono_literals;

constexpr dht::FindOptions kFresh{.quorum = 0, .enough = 0, .allow_cached = false, .deadline = {}};

TEST_CASE("A restarted node rejoins by its saved table though its initial peers are dead", "[dht][sim][b8]") {
  World world(test::seed());
  world.grow(30);
  REQUIRE(world.store(world.host(3), request("k", "v", 1h)).has_value());
  Host& host = world.host(7);
  const Host& peer = world.host(2);
  host.kill();
  world.host(2).kill();
  world.run_for(30s);
  host.cut_off = false;
  host.start_node().bootstrap({peer.address}, {}, {});
  // What is saved are addresses to try: nobody is known before it proved itself again.
  CHECK(host.node().known_nodes().empty());
  world.run_for(60s);
  CHECK(host.node().known_nodes().size() >= 20);
  CHECK(text_of(world.find(host, dht::Key::of("k"))) == "v");
}

TEST_CASE("A saved table of liars and garbage harms nothing", "[dht][sim]") {
  World world(test::seed());
  world.grow(20);
  Host& host = world.add_host();
  std::vector<std::uint8_t> garbage(1'000);
  for (auto& byte : garbage) byte = static_cast<std::uint8_t>(world.random());
  host.store().save_state(garbage);
  host.start_node().bootstrap({world.host(0).address}, {}, {});
  world.run_for(60s);
  const auto known = host.node().known_nodes();
  CHECK(known.size() >= 15);
  for (const auto& node : known) {
    bool real = false;
    for (std::size_t i = 0; i < 20; ++i) real = real || world.host(i).address == node.address;
    CHECK(real);
  }
}

TEST_CASE("A node whose initial peer starts later joins then", "[dht][sim][b6]") {
  World world(test::seed());
  Host& late = world.add_host();
  Host& host = world.add_host();
  bool contacted = false;
  host.start_node().bootstrap({late.address}, [&] { contacted = true; }, {});
  world.run_for(5min);
  CHECK_FALSE(contacted);
  late.start_node();
  CHECK(world.run_until([&] { return contacted; }, 30s));
  REQUIRE(world.store(late, request("k", "v", 1min)).has_value());
  CHECK(text_of(world.find(host, dht::Key::of("k"))) == "v");
}

TEST_CASE("Records to be kept are renewed until they are withdrawn or their publisher is gone", "[dht][sim][b26]") {
  World world(test::seed());
  world.grow(30);
  for (const std::string name : {"kept", "withdrawn"}) {
    dht::StoreRequest kept = request(name, "v", 60s);
    kept.keep = true;
    REQUIRE(world.store(world.host(4), kept).has_value());
  }
  REQUIRE(world.store(world.host(4), request("dropped", "v", 60s)).has_value());
  world.run_for(10min);
  CHECK(text_of(world.find(world.host(20), dht::Key::of("kept"), kFresh)) == "v");
  CHECK(text_of(world.find(world.host(20), dht::Key::of("dropped"), kFresh)).empty());

  std::optional<Result<dht::StoreReport>> withdrawn;
  world.host(4).node().withdraw(dht::Key::of("withdrawn"), {}, 60s, [&](auto report) { withdrawn = report; });
  REQUIRE(world.run_until([&] { return withdrawn.has_value(); }));
  CHECK(text_of(world.find(world.host(20), dht::Key::of("withdrawn"), kFresh)).empty());
  world.run_for(3min);
  CHECK(text_of(world.find(world.host(20), dht::Key::of("withdrawn"), kFresh)).empty());

  world.host(4).kill();
  world.run_for(61s);
  CHECK(text_of(world.find(world.host(20), dht::Key::of("kept"), kFresh)).empty());
}

TEST_CASE("Kept records are found while their holders come and go", "[dht][sim]") {
  World world(test::seed());
  world.grow(40);
  dht::StoreRequest kept = request("k", "v", 60s);
  kept.keep = true;
  REQUIRE(world.store(world.host(0), kept).has_value());
  std::size_t missed = 0;
  for (std::size_t i = 1; i < 30; ++i) {
    world.host(i).kill();
    world.add_host().start_node().bootstrap({world.host(0).address}, {}, {});
    world.run_for(15s);
    missed += text_of(world.find(world.host(35), dht::Key::of("k"), kFresh)) == "v" ? 0 : 1;
  }
  CHECK(missed == 0);
}

TEST_CASE("Large values follow their keys to nodes that join nearer", "[dht][sim][b24]") {
  World world(test::seed());
  world.model.loss = 0.02;
  world.grow(6, 1s, 10s);
  std::vector<std::string> values;
  for (std::size_t i = 0; i < 6; ++i) {
    values.push_back(std::string(3'000 * (i + 1) * (i + 1), static_cast<char>('a' + i)));
    values.back().resize(std::min<std::size_t>(values.back().size(), 65'536));
    REQUIRE(world.store(world.host(1), request("large" + std::to_string(i), values.back(), 1h)).has_value());
  }
  world.grow(30, 500ms, 2min);
  for (std::size_t i = 0; i < 6; ++i) world.host(i).kill();  // Everybody who was there at first.
  for (std::size_t i = 0; i < 6; ++i) {
    const auto found = world.find(world.host(20), dht::Key::of("large" + std::to_string(i)), kFresh);
    CHECK((text_of(found) == values[i]));  // Without printing 64 KiB when not.
  }
}

TEST_CASE("Losing all but one holder of each of many keys loses none", "[dht][sim]") {
  World world(test::seed());
  world.grow(64);
  constexpr std::size_t kKeys = 20;
  for (std::size_t i = 0; i < kKeys; ++i) {
    REQUIRE(world.store(world.host(0), request("k" + std::to_string(i), "v", 1h)).has_value());
  }
  // Holders of one key after the other die; whoever is the last of any key lives.
  const auto holders = [&](std::size_t key) {
    std::vector<Host*> all;
    for (std::size_t i = 0; i < world.size(); ++i) {
      Host& host = world.host(i);
      if (!host.runs()) continue;
      const dht::Key at = dht::Key::of("k" + std::to_string(key));
      if (host.store().visit(at, world.now(), 0, [](const auto&) { return true; }) != 0) all.push_back(&host);
    }
    return all;
  };
  for (std::size_t key = 0; key < kKeys; ++key) {
    for (Host* host : holders(key)) {
      const bool last_of_some = [&] {
        for (std::size_t other = 0; other < kKeys; ++other) {
          const auto left = holders(other);
          if (left.size() == 1 && left.front() == host) return true;
        }
        return false;
      }();
      if (!last_of_some && host != &world.host(0)) host->kill();
    }
  }
  for (std::size_t key = 0; key < kKeys; ++key) {
    CHECK(text_of(world.find(world.host(0), dht::Key::of("k" + std::to_string(key)), kFresh)) == "v");
  }
}

TEST_CASE("A wall clock that jumps back an hour while running changes nothing", "[dht][sim][b5]") {
  World world(test::seed());
  world.grow(20);
  Host& host = world.host(4);
  REQUIRE(world.store(host, request("k", "one", 60s)).has_value());
  host.wall_skew = -60min;
  REQUIRE(world.store(host, request("k", "two", 60s)).has_value());
  CHECK(text_of(world.find(world.host(9), dht::Key::of("k"), kFresh)) == "two");
  world.run_for(50s);
  CHECK(text_of(world.find(world.host(9), dht::Key::of("k"), kFresh)) == "two");
  world.run_for(11s);
  CHECK(text_of(world.find(world.host(9), dht::Key::of("k"), kFresh)).empty());
}

TEST_CASE("A prefix with 4096 children is listed complete", "[dht][sim][b24]") {
  World world(test::seed());
  world.grow(20);
  dht::ExpertDirectory server(world.host(2).node());
  dht::ExpertDirectory trainer(world.host(15).node());
  std::vector<ExpertUid> uids;
  for (Coordinate i = 0; i < 4'096; ++i) uids.push_back({"ffn", {3, i * 7}});
  bool announced = false;
  server.announce(std::move(uids), {{"203.0.113.5", 4040}}, 60s,
                  [&](const auto& report) { announced = report.has_value() && report->stored == 2; });
  REQUIRE(world.run_until([&] { return announced; }));
  std::vector<Result<dht::PrefixListing>> listings;
  trainer.list({{"ffn", {3}}}, world.now() + 20s, [&](auto found) { listings = std::move(found); });
  REQUIRE(world.run_until([&] { return !listings.empty(); }));
  REQUIRE(listings.front().has_value());
  CHECK(listings.front()->children.size() == 4'096);
}

}  // namespace
}  // namespace dmoe::sim
