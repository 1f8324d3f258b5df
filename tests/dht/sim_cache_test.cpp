// Copies that searches leave on their path.
#include "dht/path_cache.hpp"
#include "tests/sim/world.hpp"

#include "tests/support/catch.hpp"

#include <algorithm>

namespace dmoe::sim {
namespace {

using namespace std::chrono_literals;

dht::LiveRecord live(const CheapSigner& publisher, const dht::Key& key, std::uint64_t sequence, TimePoint deadline,
                     std::uint32_t max_ttl_ms = 5'000) {
  dht::Record record{key, publisher.public_key(), sequence, max_ttl_ms, false, {}, {1, 2, 3}, 0, {}, {}};
  dht::sign_batch(publisher, {&record, 1});
  return {record, deadline};
}

constexpr dht::Duration kUnderWay = 500ms;  // From publisher to holder to reader to copy to reader.

/// A network in which whoever joins through `gate` first hears of a key from a node that does not hold it.
struct Gated {
  World world;
  dht::Key key = dht::Key::of("k");
  Host* gate = nullptr;

  Gated(std::uint64_t seed, std::chrono::milliseconds ttl) : world(seed) {
    world.grow(40);
    dht::StoreRequest request{key, {}, {'v'}, ttl, false};
    REQUIRE(world.store(world.host(3), request).has_value());
    for (std::size_t i = 0; i < world.size() && gate == nullptr; ++i) {
      if (world.host(i).store().stats().records == 0) gate = &world.host(i);
    }
    REQUIRE(gate != nullptr);
  }

  /// A client that knows nobody but the gate looks the key up at its first contact.
  Result<dht::FindResult> find_through_gate(dht::FindOptions options = {}) {
    Host& client = world.add_host();
    client.start_node({.client_only = true, .copy_one_in = 1}).bootstrap({gate->address}, {}, {});
    return world.find(client, key, options);
  }

  void kill_holders() {
    for (std::size_t i = 0; i < world.size(); ++i) {
      Host& host = world.host(i);
      if (host.runs() && host.store().stats().records != 0) host.kill();
    }
  }
};

TEST_CASE("A search leaves a copy on its path that answers the next one and dies with its record", "[dht][sim][b3]") {
  Gated gated(test::seed(), 20s);
  const TimePoint stored = gated.world.now();
  const auto first = gated.find_through_gate();
  REQUIRE(first.has_value());
  REQUIRE(first->records.size() == 1);
  CHECK_FALSE(first->cached);
  gated.world.run_for(1s);
  REQUIRE(gated.gate->node().stats().cached_keys == 1);
  CHECK(gated.gate->store().stats().records == 0);

  gated.kill_holders();
  const auto second = gated.find_through_gate();
  REQUIRE(second.has_value());
  REQUIRE(second->records.size() == 1);
  CHECK(second->cached);
  // What remains never grows; the time that a datagram is under way is not counted.
  CHECK(second->records.front().deadline <= stored + 20s + kUnderWay);
  // Nothing was copied from the copy, and the node that has it reads it too.
  std::size_t copies = 0;
  for (std::size_t i = 0; i < gated.world.size(); ++i) {
    if (gated.world.host(i).runs()) copies += gated.world.host(i).node().stats().cached_keys;
  }
  CHECK(copies == 1);
  CHECK(gated.world.find(*gated.gate, gated.key)->cached);

  gated.world.run_for(stored + 20s + kUnderWay - gated.world.now());
  const auto late = gated.find_through_gate();
  CHECK((!late.has_value() || late->records.empty()));
  for (std::size_t i = 0; i < 40; ++i) {
    Host& host = gated.world.host(i);
    if (host.runs()) CHECK(gated.world.find(host, gated.key)->records.empty());
  }
}

TEST_CASE("A copy answers neither who wants none nor who wants several opinions", "[dht][sim][b3][b26]") {
  Gated gated(test::seed(), 10min);
  REQUIRE(gated.find_through_gate().has_value());
  gated.world.run_for(1s);
  REQUIRE(gated.gate->node().stats().cached_keys == 1);
  gated.kill_holders();
  const auto without = gated.find_through_gate({.allow_cached = false, .deadline = {}});
  CHECK((!without.has_value() || without->records.empty()));
  const auto several = gated.find_through_gate({.quorum = 2, .deadline = {}});
  CHECK((!several.has_value() || several->records.empty()));
  const auto own = gated.world.find(*gated.gate, gated.key, {.quorum = 0, .deadline = {}});
  CHECK(own->records.empty());
}

TEST_CASE("Reads with several opinions leave no copies", "[dht][sim][b26]") {
  Gated gated(test::seed(), 10min);
  REQUIRE(gated.find_through_gate({.quorum = 8, .allow_cached = false, .deadline = {}}).has_value());
  gated.world.run_for(1s);
  for (std::size_t i = 0; i < 40; ++i) CHECK(gated.world.host(i).node().stats().cached_keys == 0);
}

TEST_CASE("A copy lives a minute at most however long its record does", "[dht][b3]") {
  const CheapSigner publisher(test::seed());
  const dht::Key key = dht::Key::of("k");
  dht::PathCache cache;
  const TimePoint now{1h};
  cache.put(key, {live(publisher, key, 1, now + 10h, 36'000'000)}, 1, now);
  CHECK(cache.get(key, now + dht::kCacheLife - 1ms).size() == 1);
  CHECK(cache.get(key, now + dht::kCacheLife).empty());
}

TEST_CASE("A copy that comes again does not live longer", "[dht][b3]") {
  const CheapSigner publisher(test::seed());
  const dht::Key key = dht::Key::of("k");
  dht::PathCache cache;
  const TimePoint now{1h};
  cache.put(key, {live(publisher, key, 1, now + 5s)}, 1, now);
  // Somebody replays it with a lifetime of its own making, before and after its end.
  cache.put(key, {live(publisher, key, 1, now + 9s)}, 2, now + 4s);
  CHECK(cache.get(key, now + 6s).empty());
  cache.put(key, {live(publisher, key, 1, now + 11s)}, 2, now + 6s);
  CHECK(cache.get(key, now + 7s).empty());
  // A newer record does replace it, an older one does not come back.
  cache.put(key, {live(publisher, key, 3, now + 12s)}, 2, now + 7s);
  cache.put(key, {live(publisher, key, 2, now + 12s)}, 2, now + 7s);
  REQUIRE(cache.get(key, now + 8s).size() == 1);
  CHECK(cache.get(key, now + 8s).front().record.sequence == 3);
}

TEST_CASE("Copies are bounded as a whole and for each host", "[dht][f4]") {
  const CheapSigner publisher(test::seed());
  dht::PathCache cache;
  const TimePoint now{1h};
  for (int i = 0; i < 1'000; ++i) {
    const dht::Key key = dht::Key::of(std::to_string(i));
    cache.put(key, {live(publisher, key, 1, now + 5s)}, 7, now);
  }
  const std::size_t of_one = cache.size();
  CHECK(of_one <= 128);
  for (int i = 0; i < 5'000; ++i) {
    const dht::Key key = dht::Key::of("x" + std::to_string(i));
    cache.put(key, {live(publisher, key, 1, now + 5s)}, static_cast<std::uint64_t>(i), now);
  }
  CHECK(cache.size() > of_one);
  CHECK(cache.size() <= 1'024);
  cache.purge(now + 11s);
  CHECK(cache.size() == 0);
}

}  // namespace
}  // namespace dmoe::sim
