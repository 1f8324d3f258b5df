// What happens to records: lifetimes, owners, sizes, replicas.
#include "tests/dht/sim_values.hpp"
#include "tests/sim/world.hpp"

#include "tests/support/catch.hpp"

#include <algorithm>
#include <set>

namespace dmoe::sim {
namespace {

using namespace std::chrono_literals;

std::vector<Host*> holders_of(World& world, const std::string& name) {
  std::vector<Host*> holders;
  for (std::size_t i = 0; i < world.size(); ++i) {
    Host& host = world.host(i);
    if (!host.runs()) continue;
    const auto live = host.store().visit(dht::Key::of(name), world.now(), 0, [](const auto&) { return true; });
    if (live != 0) holders.push_back(&host);
  }
  return holders;
}

TEST_CASE("An expired record is returned by nobody and its life never grows on a hop", "[dht][sim][b1][b3]") {
  World world(test::seed());
  world.grow(30);
  REQUIRE(world.store(world.host(2), request("k", "v", 5s)).has_value());
  const TimePoint stored = world.now();
  const auto found = world.find(world.host(20), dht::Key::of("k"));
  REQUIRE(text_of(found) == "v");
  CHECK(found->records.front().deadline <= stored + 5s);
  for (Host* host : holders_of(world, "k")) {
    host->store().visit(dht::Key::of("k"), world.now(), 0, [&](const dht::LiveRecord& live) {
      CHECK(live.deadline <= stored + 5s);
      return true;
    });
  }
  world.run_for(5s);
  for (std::size_t i = 0; i < world.size(); ++i) CHECK(text_of(world.find(world.host(i), dht::Key::of("k"))).empty());
}

TEST_CASE("A replayed record does not live again after it expired", "[dht][sim][b3]") {
  World world(test::seed());
  Host& host = world.add_host();
  dht::Record record{dht::Key::of("k"), host.signer().public_key(), 7, 5'000, false, {}, {1, 2, 3}, 0, {}, {}};
  dht::sign_batch(host.signer(), {&record, 1});
  CHECK(host.store().put({record, world.now() + 5s}, 1, world.now()) == dht::PutOutcome::kStored);
  world.run_for(6s);
  CHECK(host.store().put({record, world.now() + 5s}, 1, world.now()) == dht::PutOutcome::kOlder);
  CHECK(host.store().visit(record.key, world.now(), 0, [](const auto&) { return true; }) == 0);
}

TEST_CASE("Clocks hours apart change nothing", "[dht][sim][b5]") {
  World world(test::seed());
  world.grow(30);
  for (std::size_t i = 0; i < world.size(); ++i) {
    world.host(i).wall_skew = std::chrono::minutes{static_cast<int>(world.random() % 1'200) - 600};
  }
  REQUIRE(world.store(world.host(4), request("k", "v", 60s)).has_value());
  CHECK(text_of(world.find(world.host(9), dht::Key::of("k"))) == "v");
  world.run_for(50s);
  CHECK(text_of(world.find(world.host(10), dht::Key::of("k"))) == "v");
  world.run_for(11s);
  CHECK(text_of(world.find(world.host(11), dht::Key::of("k"))).empty());
}

TEST_CASE("A publisher whose clock went back replaces its own newer record", "[dht][sim][b5]") {
  World world(test::seed());
  world.grow(20);
  REQUIRE(world.store(world.host(4), request("k", "old")).has_value());
  // The same identity starts anew, an hour earlier by its own clock.
  Host& host = world.host(4);
  const auto peer = world.host(5).address;
  host.kill();
  host.cut_off = false;
  host.wall_skew = -60min;
  host.start_node().bootstrap({peer}, {}, {});
  world.run_for(30s);
  const auto stored = world.store(host, request("k", "new"));
  REQUIRE(stored.has_value());
  CHECK(text_of(world.find(world.host(11), dht::Key::of("k"), {.quorum = 0, .deadline = {}})) == "new");
}

TEST_CASE("The newest sequence is what readers see", "[dht][sim]") {
  World world(test::seed());
  world.grow(40);
  for (int i = 0; i < 5; ++i) {
    REQUIRE(world.store(world.host(3), request("k", "v" + std::to_string(i))).has_value());
    CHECK(text_of(world.find(world.host(30), dht::Key::of("k"), {.quorum = 2, .deadline = {}})) ==
          "v" + std::to_string(i));
  }
}

TEST_CASE("Two publishers under one key do not touch each other", "[dht][sim][f3]") {
  World world(test::seed());
  world.grow(30);
  REQUIRE(world.store(world.host(1), request("k", "mine")).has_value());
  REQUIRE(world.store(world.host(2), request("k", "theirs", 20min)).has_value());
  const auto found = world.find(world.host(12), dht::Key::of("k"), {.quorum = 3, .deadline = {}});
  REQUIRE(found.has_value());
  std::set<std::string> values;
  for (const auto& live : found->records) values.emplace(live.record.value.begin(), live.record.value.end());
  CHECK(values == std::set<std::string>{"mine", "theirs"});
}

TEST_CASE("A forged record is neither kept nor believed", "[dht][sim][f3]") {
  World world(test::seed());
  Host& victim = world.add_host();
  dht::Record record{dht::Key::of("k"), victim.signer().public_key(), 7, 60'000, false, {}, {1}, 0, {}, {}};
  dht::sign_batch(victim.signer(), {&record, 1});
  dht::RecordVerifier verifier(victim.signer());
  CHECK(verifier.verify(record));
  dht::Record longer = record;
  longer.max_ttl_ms = 600'000;
  CHECK_FALSE(verifier.verify(longer));
  dht::Record newer = record;
  newer.sequence = 8;
  CHECK_FALSE(verifier.verify(newer));
  dht::Record other = record;
  other.value = {2};
  CHECK_FALSE(verifier.verify(other));
  dht::Record elsewhere = record;
  elsewhere.key = dht::Key::of("l");
  CHECK_FALSE(verifier.verify(elsewhere));
}

TEST_CASE("A lifetime of ten years is clipped and a publisher has a quota", "[dht][sim][f4]") {
  World world(test::seed());
  world.grow(10);
  REQUIRE(world.store(world.host(1), request("k", "v", std::chrono::hours{24 * 365 * 10})).has_value());
  const auto found = world.find(world.host(5), dht::Key::of("k"));
  REQUIRE(found.has_value());
  CHECK(found->records.front().deadline <= world.now() + 24h);

  dht::StoreLimits limits;
  limits.max_records_per_publisher = 100;
  dht::MemoryStore store(limits);
  const CheapSigner publisher(test::seed());
  std::size_t taken = 0;
  for (int i = 0; i < 1'000; ++i) {
    const dht::Record record{
        dht::Key::of(std::to_string(i)), publisher.public_key(), 1, 60'000, false, {}, {1}, 0, {}, {}};
    taken += store.put({record, world.now() + 60s}, 5, world.now()) == dht::PutOutcome::kStored ? 1 : 0;
  }
  CHECK(taken == 100);
  CHECK(store.stats().records == 100);
}

TEST_CASE("A tombstone hides a record at once", "[dht][sim][b26]") {
  World world(test::seed());
  world.grow(30);
  REQUIRE(world.store(world.host(1), request("k", "v")).has_value());
  REQUIRE(text_of(world.find(world.host(9), dht::Key::of("k"))) == "v");
  auto tombstone = request("k", "");
  tombstone.tombstone = true;
  REQUIRE(world.store(world.host(1), tombstone).has_value());
  world.run_for(2s);
  for (std::size_t i = 0; i < world.size(); ++i) {
    CHECK(text_of(world.find(world.host(i), dht::Key::of("k"), {.quorum = 2, .allow_cached = false, .deadline = {}}))
              .empty());
  }
}

TEST_CASE("A value of 64 KiB travels whole and a larger one is a typed error", "[dht][sim][b24]") {
  World world(test::seed());
  world.model.loss = 0.02;
  world.grow(20);
  std::string large(65'536, '\0');
  for (std::size_t i = 0; i < large.size(); ++i) large[i] = static_cast<char>(i * 31 + i / 256);
  const auto stored = world.store(world.host(1), request("large", large));
  REQUIRE(stored.has_value());
  CHECK(stored->replicas >= 6);
  CHECK(text_of(world.find(world.host(15), dht::Key::of("large"))) == large);
  const auto refused = world.store(world.host(1), request("larger", std::string(70'000, 'x')));
  REQUIRE_FALSE(refused.has_value());
  CHECK(refused.error().code == Errc::kInvalidArgument);
}

TEST_CASE("A key with a thousand subkeys is returned complete", "[dht][sim][b24]") {
  World world(test::seed());
  world.grow(20);
  std::vector<dht::StoreRequest> requests;
  for (int i = 0; i < 1'000; ++i) {
    requests.push_back(request("k", "value" + std::to_string(i), 30min, "sub" + std::to_string(i)));
  }
  for (const auto& stored : world.store_many(world.host(1), std::move(requests))) REQUIRE(stored.has_value());
  const auto found = world.find(world.host(9), dht::Key::of("k"));
  REQUIRE(found.has_value());
  CHECK(found->records.size() == 1'000);
}

TEST_CASE("Losing all but one of the holders loses nothing", "[dht][sim]") {
  World world(test::seed());
  world.grow(36);
  REQUIRE(world.store(world.host(1), request("k", "v", 2h)).has_value());
  auto holders = holders_of(world, "k");
  REQUIRE(holders.size() >= 8);
  Host* reader = nullptr;
  for (std::size_t i = 0; i < world.size() && reader == nullptr; ++i) {
    if (std::find(holders.begin(), holders.end(), &world.host(i)) == holders.end()) reader = &world.host(i);
  }
  for (std::size_t i = 1; i < holders.size(); ++i) holders[i]->kill();
  CHECK(text_of(world.find(*reader, dht::Key::of("k"))) == "v");
  // The survivor hands it on.
  world.run_for(20min);
  CHECK(holders_of(world, "k").size() >= 6);
}

TEST_CASE("Nodes that join nearer to a key get its records", "[dht][sim]") {
  World world(test::seed());
  world.grow(12);
  std::vector<std::string> names;
  for (int i = 0; i < 20; ++i) {
    names.push_back("key" + std::to_string(i));
    REQUIRE(world.store(world.host(1), request(names.back(), "v", 4min)).has_value());
  }
  world.grow(40);
  std::vector<std::size_t> order(world.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::size_t in_place = 0;
  for (const std::string& name : names) {
    const dht::Bits key = dht::Key::of(name).bytes;
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return dht::closer(world.host(a).node().id().bytes, world.host(b).node().id().bytes, key);
    });
    const auto holders = holders_of(world, name);
    for (std::size_t i = 0; i < 8; ++i) {
      in_place += std::find(holders.begin(), holders.end(), &world.host(order[i])) != holders.end() ? 1 : 0;
    }
  }
  CHECK(in_place >= 20 * 8 * 9 / 10);
}

}  // namespace
}  // namespace dmoe::sim
