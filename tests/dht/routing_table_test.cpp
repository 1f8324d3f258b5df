#include "dht/routing_table.hpp"

#include "tests/support/catch.hpp"

#include <algorithm>
#include <random>

namespace dmoe::dht {
namespace {

NodeId random_id(std::mt19937_64& random) {
  NodeId id;
  for (auto& byte : id.bytes) byte = static_cast<std::uint8_t>(random());
  return id;
}

Address address(std::uint32_t number) { return Address::v4(0x0B000001U + (number << 8U), 4040); }

TEST_CASE("The nearest nodes of the table are those that a full sort gives", "[dht]") {
  std::mt19937_64 random(test::seed());
  RoutingTable table(random_id(random), true);
  for (std::uint32_t i = 0; i < 2'000; ++i) table.offer(random_id(random), address(i), TimePoint{});
  auto all = table.contacts();
  REQUIRE(all.size() == table.size());
  for (int round = 0; round < 50; ++round) {
    const NodeId target = random_id(random);
    std::sort(all.begin(), all.end(),
              [&](const Contact& a, const Contact& b) { return closer(a.id.bytes, b.id.bytes, target.bytes); });
    const auto nearest = table.closest(target.bytes, 20);
    REQUIRE(nearest.size() == 20);
    for (std::size_t i = 0; i < nearest.size(); ++i) CHECK(nearest[i].id == all[i].id);
  }
}

TEST_CASE("A hundred nodes of one subnet get at most four places in a bucket", "[dht][f8]") {
  std::mt19937_64 random(test::seed());
  const NodeId self = random_id(random);
  RoutingTable table(self, true);
  for (std::uint16_t i = 0; i < 100; ++i) {
    NodeId id = random_id(random);
    id.bytes[0] = static_cast<std::uint8_t>(self.bytes[0] ^ 0x80U);
    table.offer(id, Address::v4(0x08080801U, static_cast<std::uint16_t>(1'000 + i)), TimePoint{});
  }
  CHECK(table.size() == 4);
}

TEST_CASE("A known id at another address is refused", "[dht][f8]") {
  std::mt19937_64 random(test::seed());
  RoutingTable table(random_id(random), true);
  const NodeId id = random_id(random);
  CHECK(table.offer(id, address(1), TimePoint{}) == RoutingTable::Offer::kAdded);
  CHECK(table.offer(id, address(2), TimePoint{}) == RoutingTable::Offer::kRefused);
  CHECK(table.find(id)->address == address(1));
}

TEST_CASE("A full bucket keeps newcomers as spares and takes one when an old entry fails", "[dht]") {
  std::mt19937_64 random(test::seed());
  const NodeId self = random_id(random);
  RoutingTable table(self, true);
  std::vector<NodeId> ids;
  for (std::uint32_t i = 0; i < 30; ++i) {
    NodeId id = self;  // All in the bucket of five shared bits.
    id.bytes[0] = static_cast<std::uint8_t>(id.bytes[0] ^ 0x04U);
    for (std::size_t byte = 1; byte < 32; ++byte) id.bytes[byte] = static_cast<std::uint8_t>(random());
    ids.push_back(id);
    const auto offer = table.offer(id, address(i), TimePoint{});
    CHECK(offer == (i < kBucketSize ? RoutingTable::Offer::kAdded : RoutingTable::Offer::kSpare));
  }
  CHECK(table.size() == kBucketSize);
  CHECK(table.failed(ids[3], address(3)));
  CHECK(table.size() == kBucketSize);
  CHECK(table.find(ids[3]) == nullptr);
  CHECK(table.find(ids[29]) != nullptr);
}

}  // namespace
}  // namespace dmoe::dht
