// Initial peers that are given as names.
#include "dht/bootstrap.hpp"
#include "tests/sim/world.hpp"

#include "tests/support/catch.hpp"

#include <map>

namespace dmoe::sim {
namespace {

using namespace std::chrono_literals;

/// A name server with one host's answers; each takes a moment.
class Names {
 public:
  explicit Names(Host& host) : host_(host) {}
  void set(const std::string& name, std::vector<Address> addresses) { records_[name] = std::move(addresses); }
  std::size_t asked() const { return asked_; }
  dht::Resolve resolve() {
    return [this](const net::Endpoint& peer, auto done) {
      ++asked_;
      host_.schedule(host_.now() + 20ms, [this, peer, done] {
        const auto found = records_.find(peer.host);
        if (found != records_.end()) return done(found->second);
        done(Error{Errc::kUnavailable, "cannot resolve the name (no such host)", {}});
      });
    };
  }

 private:
  Host& host_;
  std::map<std::string, std::vector<Address>> records_;
  std::size_t asked_ = 0;
};

/// A node that knows its peers by name only.
struct Joiner {
  Host& host;
  Names names{host};
  std::shared_ptr<dht::Bootstrap> bootstrap;
  std::optional<Result<void>> joined;

  explicit Joiner(Host& host_in) : host(host_in) { host.start_node(); }
  void join(std::vector<net::Endpoint> peers) {
    const std::shared_ptr<dht::Clock> clock(std::shared_ptr<void>(), &host);
    bootstrap = std::make_shared<dht::Bootstrap>(host.node(), clock, names.resolve(), dht::Bootstrap::Accepts{},
                                                 std::move(peers), 10s);
    bootstrap->start([this](Result<void> result) { joined = std::move(result); });
  }
};

bool sees(World& world, Host& from, const std::string& name) {
  const auto found = world.find(from, dht::Key::of(name), {.quorum = 0, .allow_cached = false, .deadline = {}});
  return found.has_value() && !found->records.empty();
}

TEST_CASE("A node whose peers all moved joins them where their name leads now", "[dht][sim][b27]") {
  World world(test::seed());
  world.grow(6, 1s, 10s);
  Joiner joiner(world.add_host());
  joiner.names.set("seed.test", {world.host(0).address});
  joiner.join({{"seed.test", 4040}});
  REQUIRE(world.run_until([&] { return joiner.joined.has_value(); }));
  REQUIRE(joiner.joined->has_value());
  world.run_for(2min);
  REQUIRE(joiner.host.node().known_nodes().size() == 6);

  // The whole network goes and comes back elsewhere; only the name's record says where.
  for (std::size_t i = 0; i < 6; ++i) world.host(i).kill();
  world.run_for(5min);
  Host& moved = world.add_host();
  moved.start_node();
  world.add_host().start_node().bootstrap({moved.address}, {}, {});
  world.run_for(10s);
  REQUIRE(world.store(moved, {dht::Key::of("k"), {}, {1}, 1h, false}).has_value());
  CHECK_FALSE(sees(world, joiner.host, "k"));
  joiner.names.set("seed.test", {moved.address});
  world.run_for(90s);  // Asked again once a minute.
  CHECK(sees(world, joiner.host, "k"));
  CHECK(joiner.names.asked() >= 5);
}

TEST_CASE("A peer's first address may be dead and another one of the same name is used", "[dht][sim][b20][b27]") {
  World world(test::seed());
  world.grow(3, 1s, 10s);
  Address nowhere_v6;
  nowhere_v6.ip = {0x20, 0x01, 0x0D, 0xB8};
  nowhere_v6.port = 4040;
  Joiner joiner(world.add_host());
  joiner.names.set("seed.test", {nowhere_v6, Address::v4(0x62000001, 4040), world.host(0).address});
  joiner.join({{"seed.test", 4040}});
  REQUIRE(world.run_until([&] { return joiner.joined.has_value(); }));
  CHECK(joiner.joined->has_value());
}

TEST_CASE("A name without addresses yet is asked for until it has one", "[dht][sim][b6][b27]") {
  World world(test::seed());
  world.grow(3, 1s, 10s);
  REQUIRE(world.store(world.host(0), {dht::Key::of("k"), {}, {1}, 1h, false}).has_value());
  Joiner joiner(world.add_host());
  joiner.join({{"seed.test", 4040}, {"other.test", 4041}});
  REQUIRE(world.run_until([&] { return joiner.joined.has_value(); }));
  REQUIRE_FALSE(joiner.joined->has_value());
  CHECK(joiner.joined->error().message.find("seed.test:4040: cannot resolve") != std::string::npos);
  CHECK(joiner.joined->error().message.find("other.test:4041: cannot resolve") != std::string::npos);
  world.run_for(10min);
  joiner.names.set("other.test", {world.host(1).address});
  world.run_for(60s);
  CHECK(sees(world, joiner.host, "k"));
}

}  // namespace
}  // namespace dmoe::sim
