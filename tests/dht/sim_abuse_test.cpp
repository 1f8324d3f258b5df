// What strangers try: floods of third parties, many identities, others' identities, others' records.
#include "tests/dht/sim_values.hpp"
#include "tests/sim/liar.hpp"
#include "tests/sim/world.hpp"

#include "tests/support/catch.hpp"

#include <algorithm>

namespace dmoe::sim {
namespace {

using namespace std::chrono_literals;
namespace wire = dht::wire;

TEST_CASE("A silent address that liars name gets few datagrams a minute from a node", "[dht][sim][f13]") {
  World world(test::seed());
  world.grow(30);
  Host& victim = world.add_host();
  const std::vector<wire::NodeInfo> nobody;
  std::vector<std::unique_ptr<Liar>> liars;
  for (std::size_t i = 20; i < 30; ++i) {
    Host& host = world.host(i);
    host.kill();
    host.cut_off = false;
    liars.push_back(std::make_unique<Liar>(host, world, nobody));
    liars.back()->blame({victim.address});
  }
  // A thousand keys, each of which the liars say the victim is near to.
  for (int minute = 0; minute < 2; ++minute) {
    const std::uint64_t before = victim.arrived;
    const TimePoint until = world.now() + 60s;
    for (int i = 0; i < 500; ++i) {
      (void)finds(world, world.host(0), "nothing" + std::to_string(minute * 500 + i));
      if (world.now() >= until) break;
    }
    if (world.now() < until) world.run_for(until - world.now());
    // Of each of the 21 nodes eight requests a minute, each sent twice at most; their minutes begin within ours.
    CHECK(victim.arrived - before <= 2 * 21 * 16);
  }
  CHECK(victim.arrived > 0);
}

TEST_CASE("One reader sends a named victim sixteen datagrams a minute at most", "[dht][sim][f13]") {
  World world(test::seed());
  Host& reader = world.add_host();
  Host& victim = world.add_host();
  Host& host = world.add_host();
  const std::vector<wire::NodeInfo> nobody;
  Liar liar(host, world, nobody);
  liar.blame({victim.address});
  reader.start_node().bootstrap({host.address}, {}, {});
  world.run_for(5s);
  for (int minute = 0; minute < 3; ++minute) {
    const std::uint64_t before = victim.arrived;
    const TimePoint until = world.now() + 61s;
    for (int i = 0; i < 300; ++i) {
      reader.node().find(dht::Key::of(std::to_string(minute * 300 + i)), {}, [](const Result<dht::FindResult>&) {});
      world.run_for(100ms);
    }
    world.run_for(until - world.now());
    CHECK(victim.arrived - before <= 2 * 16);  // The counted minutes and this one may overlap.
  }
}

TEST_CASE("Nobody is sent into loopback or private networks by a node of the internet", "[dht][sim][f13]") {
  World world(test::seed());
  world.grow(20);
  const std::vector<Address> targets = {Address::v4(0x7F000001, 22), Address::v4(0xA9FEA9FE, 80),
                                        Address::v4(0x0A000001, 445), Address::v4(0xC0A80001, 80),
                                        Address::v4(0xE0000001, 4040)};
  std::vector<Host*> listeners;
  for (const Address& target : targets) listeners.push_back(&world.add_host(target));
  const std::vector<wire::NodeInfo> nobody;
  std::vector<std::unique_ptr<Liar>> liars;
  for (std::size_t i = 10; i < 20; ++i) {
    Host& host = world.host(i);
    host.kill();
    host.cut_off = false;
    liars.push_back(std::make_unique<Liar>(host, world, nobody));
    liars.back()->blame(targets);
  }
  for (int i = 0; i < 100; ++i) (void)finds(world, world.host(i % 10), "nothing" + std::to_string(i));
  (void)world.store(world.host(1), request("something"));
  world.run_for(2min);
  for (const Host* listener : listeners) CHECK(listener->arrived == 0);
}

/// Signers whose node ids are the nearest of many tried to `key`: what a patient attacker has.
std::vector<CheapSigner> near_to(const dht::Key& key, std::size_t count, std::uint64_t seed) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> tried;
  for (std::uint64_t i = 0; i < 20'000; ++i) {
    const CheapSigner signer(seed + i);
    tried.emplace_back(dht::distance_prefix(net::peer_id_of(signer.public_key()).bytes, key.bytes), seed + i);
  }
  std::sort(tried.begin(), tried.end());
  std::vector<CheapSigner> nearest;
  for (std::size_t i = 0; i < count; ++i) nearest.emplace_back(tried[i].second);
  return nearest;
}

TEST_CASE("A hundred false nodes of one subnet around a key do not hide its record", "[dht][sim][f8]") {
  World world(test::seed());
  world.grow(60);
  REQUIRE(world.store(world.host(3), request("k")).has_value());
  std::vector<wire::NodeInfo> accomplices;
  std::vector<std::unique_ptr<Liar>> liars;
  std::uint32_t ip = 0x60000100;  // A /24 of its own.
  for (const CheapSigner& signer : near_to(dht::Key::of("k"), 100, test::seed() * 1'000'003 + 1)) {
    Host& host = world.add_host(Address::v4(++ip, 4040), signer);
    liars.push_back(std::make_unique<Liar>(host, world, accomplices));
    accomplices.push_back(liars.back()->info());
  }
  // Each becomes known to everybody: they ask for anything, and prove who they are.
  wire::Buffer buffer;
  for (std::size_t i = 60; i < world.size(); ++i) {
    wire::Message ping;
    ping.transaction = world.random();
    ping.sender = world.host(i).signer().public_key();
    ping.body = wire::Ping{};
    REQUIRE(wire::encode(ping, buffer));
    buffer.pad_to(dht::kMaxDatagram);
    for (std::size_t to = 0; to < 60; ++to) world.host(i).send(world.host(to).address, buffer.bytes());
  }
  world.run_for(10s);
  for (std::size_t i = 0; i < 60; ++i) {
    const auto known = world.host(i).node().known_nodes();
    const auto theirs = std::count_if(known.begin(), known.end(), [](const auto& node) {
      return node.address.subnet() == Address::v4(0x60000100, 1).subnet();
    });
    CHECK(theirs <= 4 * 8);  // Four in a bucket; so few bits that most share one.
  }
  std::size_t missed = 0;
  for (std::size_t i = 0; i < 60; ++i) missed += finds(world, world.host(i), "k") ? 0 : 1;
  CHECK(missed == 0);
  // Newcomers, and what is published meanwhile.
  Host& newcomer = world.add_host();
  newcomer.start_node().bootstrap({world.host(5).address}, {}, {});
  world.run_for(10s);
  CHECK(finds(world, newcomer, "k"));
  REQUIRE(world.store(world.host(9), request("k")).has_value());
  const auto both = world.find(world.host(20), dht::Key::of("k"), {.quorum = 0, .deadline = {}});
  REQUIRE(both.has_value());
  CHECK(both->records.size() == 2);
}

TEST_CASE("A datagram with a known identity from elsewhere changes nothing", "[dht][sim][f8]") {
  World world(test::seed());
  world.grow(12);
  Host& node = world.host(4);
  Host& victim = world.host(7);
  Host& thief = world.add_host();
  wire::Message forged;
  forged.transaction = 1;
  forged.sender = victim.signer().public_key();
  forged.body = wire::Ping{};
  wire::Buffer buffer;
  REQUIRE(wire::encode(forged, buffer));
  buffer.pad_to(dht::kMaxDatagram);
  for (int i = 0; i < 20; ++i) {
    thief.send(node.address, buffer.bytes());
    world.run_for(1s);
  }
  const auto known = node.node().known_nodes();
  const auto entry =
      std::find_if(known.begin(), known.end(), [&](const auto& info) { return info.id == victim.node().id(); });
  REQUIRE(entry != known.end());
  CHECK(entry->address == victim.address);
}

TEST_CASE("A reply that carries the own identity is not believed", "[dht][sim][f8]") {
  World world(test::seed());
  world.grow(8);
  Host& reader = world.host(2);
  Host& host = world.add_host();
  const std::vector<wire::NodeInfo> nobody;
  Liar liar(host, world, nobody);
  liar.name_only({reader.node().id(), host.address});  // "You live here", says the liar.
  REQUIRE(world.store(world.host(3), request("k")).has_value());
  std::optional<Result<dht::PingReport>> answered;
  reader.node().ping(host.address, [&](auto report) { answered = std::move(report); });
  REQUIRE(world.run_until([&] { return answered.has_value(); }));
  for (int i = 0; i < 30; ++i) (void)finds(world, reader, "nothing" + std::to_string(i));
  for (const auto& known : reader.node().known_nodes()) CHECK(known.id != reader.node().id());
  CHECK(finds(world, reader, "k"));
}

TEST_CASE("A hundred thousand keys of one publisher end at its quota", "[dht][f4]") {
  dht::MemoryStore store;
  const CheapSigner publisher(test::seed());
  const TimePoint now{1h};
  std::size_t taken = 0;
  for (std::uint32_t i = 0; i < 100'000; ++i) {
    dht::Record record{{}, publisher.public_key(), 1, 60'000, false, {}, {1}, 0, {}, {}};
    for (std::size_t byte = 0; byte < 4; ++byte) record.key.bytes[byte] = static_cast<std::uint8_t>(i >> (8 * byte));
    taken += store.put({record, now + 60s}, 5, now) == dht::PutOutcome::kStored ? 1 : 0;
  }
  CHECK(taken == dht::StoreLimits{}.max_records_per_publisher);
  CHECK(store.stats().bytes <= dht::StoreLimits{}.max_bytes_per_publisher);
}

}  // namespace
}  // namespace dmoe::sim
