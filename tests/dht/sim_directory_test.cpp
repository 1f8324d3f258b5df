// Listings of prefixes with more than a datagram holds: many children, many servers.
#include "dht/expert_directory.hpp"
#include "tests/sim/world.hpp"

#include "tests/support/catch.hpp"

namespace dmoe::sim {
namespace {

using namespace std::chrono_literals;

Result<dht::AnnounceReport> announce(World& world, dht::ExpertDirectory& directory, std::vector<ExpertUid> uids) {
  std::optional<Result<dht::AnnounceReport>> report;
  directory.announce(std::move(uids), {{"203.0.113.5", 4040}}, 10min, [&](auto told) { report = std::move(told); });
  world.run_until([&] { return report.has_value(); });
  return std::move(report).value();
}

Result<dht::PrefixListing> list(World& world, Host& from, const ExpertPrefix& prefix) {
  dht::ExpertDirectory directory(from.node());
  std::optional<Result<dht::PrefixListing>> listing;
  directory.list({prefix}, world.now() + 30s, [&](auto listings) { listing = std::move(listings.front()); });
  world.run_until([&] { return listing.has_value(); });
  return std::move(listing).value();
}

TEST_CASE("A prefix with 4096 children of one server is listed complete", "[dht][sim][b24]") {
  World world(test::seed());
  world.model.loss = 0.02;
  world.grow(20);
  dht::ExpertDirectory directory(world.host(3).node());
  std::vector<ExpertUid> uids;
  for (Coordinate i = 0; i < 4'096; ++i) uids.push_back({"ffn", {3 * i}});  // Gaps: nothing is run-length coded.
  const auto report = announce(world, directory, uids);
  REQUIRE(report.has_value());
  CHECK(report->stored == 1);
  for (const std::size_t reader : {0U, 9U, 17U}) {
    const auto listing = list(world, world.host(reader), {"ffn", {}});
    REQUIRE(listing.has_value());
    REQUIRE(listing->children.size() == 4'096);
    for (Coordinate i = 0; i < 4'096; ++i) {
      REQUIRE(listing->children[i].coordinate == 3 * i);
      REQUIRE(listing->children[i].servers.size() == 1);
    }
  }
}

TEST_CASE("A prefix of sixty servers is listed complete in lossy networks too", "[dht][sim][b24]") {
  constexpr std::size_t kServers = 60;
  for (const double loss : {0.0, 0.1}) {
    World world(test::seed());
    world.grow(80);
    std::vector<std::unique_ptr<dht::ExpertDirectory>> directories;
    for (std::size_t i = 0; i < kServers; ++i) {
      directories.push_back(std::make_unique<dht::ExpertDirectory>(world.host(i).node()));
      std::vector<ExpertUid> uids;
      for (Coordinate row = 0; row < 4; ++row) uids.push_back({"ffn", {row, static_cast<Coordinate>(i)}});
      REQUIRE(announce(world, *directories.back(), std::move(uids)).has_value());
    }
    world.model.loss = loss;
    std::size_t missing = 0;
    for (std::size_t reader = 60; reader < 80; ++reader) {
      for (Coordinate row = 0; row < 4; ++row) {
        const auto listing = list(world, world.host(reader), {"ffn", {row}});
        REQUIRE(listing.has_value());
        missing += kServers - listing->children.size();
      }
    }
    CHECK(missing == 0);
  }
}

}  // namespace
}  // namespace dmoe::sim
