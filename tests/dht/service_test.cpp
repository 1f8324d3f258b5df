// Nodes on real sockets.
#include "tests/dht/service_fixture.hpp"

#include "tests/support/catch.hpp"

namespace dmoe::dht::test {
namespace {

using namespace std::chrono_literals;

TEST_CASE("A first node alone stores and finds at once", "[dht][udp][b9]") {
  Loopback loopback;
  const auto service = loopback.start();
  REQUIRE(join(*service).has_value());
  const auto stored = store(*service, "k", "v");
  REQUIRE(stored.has_value());
  CHECK(stored->replicas == 1);
  CHECK(text_of(find(*service, "k")) == "v");
  CHECK(find(*service, "other")->records.empty());
  const auto announced = announce(*service, {"ffn.0.1"}, {"127.0.0.1", 4040});
  REQUIRE(announced.has_value());
  CHECK(announced->stored == 2);
}

TEST_CASE("Nodes on real sockets find what others stored", "[dht][udp]") {
  Loopback loopback(2);
  std::vector<std::unique_ptr<Service>> services;
  services.push_back(loopback.start());
  for (int i = 0; i < 11; ++i) services.push_back(loopback.start_joined({endpoint_of(*services.front())}));
  for (int i = 0; i < 12; ++i) {
    const auto stored =
        store(*services[static_cast<std::size_t>(i)], "key" + std::to_string(i), "value" + std::to_string(i));
    REQUIRE(stored.has_value());
    CHECK(stored->replicas >= 2);
  }
  for (const auto& service : services) {
    for (int i = 0; i < 12; ++i)
      CHECK(text_of(find(*service, "key" + std::to_string(i))) == "value" + std::to_string(i));
  }
}

TEST_CASE("Announced experts are listed with their endpoints and vanish when withdrawn", "[dht][udp][b26]") {
  Loopback loopback(2);
  const auto first = loopback.start();
  const auto server = loopback.start_joined({endpoint_of(*first)});
  const auto trainer = loopback.start_joined({endpoint_of(*first)});
  const auto report = announce(*server, {"ffn.3.17", "ffn.3.20", "ffn.5.1"}, {"127.0.0.1", 9'999});
  REQUIRE(report.has_value());
  CHECK(report->records == 3);
  CHECK(report->stored == 3);
  auto listings = list(*trainer, {"ffn.", "ffn.3.", "ffn.4."});
  REQUIRE(listings.size() == 3);
  REQUIRE(listings[0].has_value());
  REQUIRE(listings[0]->children.size() == 2);
  CHECK(listings[0]->children[0].coordinate == 3);
  CHECK(listings[0]->children[1].coordinate == 5);
  REQUIRE(listings[1].has_value());
  REQUIRE(listings[1]->children.size() == 2);
  CHECK(listings[1]->children[1].coordinate == 20);
  CHECK(listings[1]->children[1].servers.front()->endpoints.front() == net::Endpoint{"127.0.0.1", 9'999});
  CHECK(listings[1]->children[1].servers.front()->peer == server->node().id());
  REQUIRE(listings[2].has_value());
  CHECK(listings[2]->children.empty());

  // A smaller announcement replaces the larger one at once.
  REQUIRE(announce(*server, {"ffn.3.17"}, {"127.0.0.1", 9'999}).has_value());
  listings = list(*trainer, {"ffn.3.", "ffn.5."});
  REQUIRE(listings[0]->children.size() == 1);
  CHECK(listings[1]->children.empty());

  std::promise<Result<AnnounceReport>> withdrawn;
  server->directory().withdraw_all([&](Result<AnnounceReport> result) { withdrawn.set_value(std::move(result)); });
  REQUIRE(withdrawn.get_future().get().has_value());
  listings = list(*trainer, {"ffn.", "ffn.3."});
  CHECK(listings[0]->children.empty());
  CHECK(listings[1]->children.empty());
}

TEST_CASE("A fresh client sees the experts of every server while a network forms", "[dht][udp]") {
  Loopback loopback(2);
  std::vector<std::unique_ptr<Service>> servers;
  servers.push_back(loopback.start());
  // Each announces before the next joins, so each record lies on other nodes than the one before it.
  for (int i = 0; i < 6; ++i) {
    servers.push_back(loopback.start_joined({endpoint_of(*servers.front())}));
    const auto port = static_cast<std::uint16_t>(9'000 + i);
    REQUIRE(announce(*servers.back(), {"ffn.0." + std::to_string(i)}, {"127.0.0.1", port}).has_value());
  }
  for (int i = 0; i < 5; ++i) {
    const auto trainer = loopback.start_joined({endpoint_of(*servers.front())});
    const auto listings = list(*trainer, {"ffn.0."});
    REQUIRE(listings[0].has_value());
    CHECK(listings[0]->children.size() == 6);
  }
}

TEST_CASE("A port in use is a clear error", "[dht][udp][b21]") {
  Loopback loopback;
  const auto first = loopback.start();
  ServiceOptions options;
  options.listen = endpoint_of(*first);
  const auto second = Service::start(loopback.io(), net::Identity::generate(), options);
  REQUIRE_FALSE(second.has_value());
  CHECK(second.error().code == Errc::kUnavailable);
  CHECK(second.error().message.find(std::to_string(first->port())) != std::string::npos);
}

TEST_CASE("Joining fails with every address and its reason when all are dead", "[dht][udp][b6]") {
  Loopback loopback;
  ServiceOptions options;
  options.initial_peers = {{"127.0.0.1", 1}, {"no-such-host.invalid", 4'040}};
  options.join_timeout = 300ms;
  const auto service = loopback.start(options);
  const auto joined = join(*service);
  REQUIRE_FALSE(joined.has_value());
  CHECK(joined.error().code == Errc::kUnavailable);
  CHECK(joined.error().message.find("127.0.0.1:1") != std::string::npos);
  CHECK(joined.error().message.find("no-such-host.invalid") != std::string::npos);
}

TEST_CASE("One live address among dead ones is enough and names are resolved", "[dht][udp][b6][b27]") {
  Loopback loopback;
  const auto first = loopback.start();
  ServiceOptions options;
  options.initial_peers = {{"127.0.0.1", 1}, {"localhost", first->port()}, {"127.0.0.1", 2}};
  const auto service = loopback.start(options);
  CHECK(join(*service).has_value());
}

TEST_CASE("A copy of an identity learns where the original is", "[dht][udp][b14]") {
  Loopback loopback;
  const auto first = loopback.start();
  const net::Identity identity = net::Identity::generate();
  ServiceOptions options;
  options.initial_peers = {endpoint_of(*first)};
  const auto original = loopback.start(options, identity);
  REQUIRE(join(*original).has_value());
  while (stats(*first).known_nodes == 0) std::this_thread::yield();
  const auto copy = loopback.start(options, identity);
  const auto joined = join(*copy);
  REQUIRE_FALSE(joined.has_value());
  CHECK(joined.error().message.find(std::to_string(original->port())) != std::string::npos);
  REQUIRE(store(*first, "still", "here").has_value());
  CHECK(text_of(find(*original, "still")) == "here");
}

TEST_CASE("A client finds and announces but holds nothing", "[dht][udp]") {
  Loopback loopback;
  const auto first = loopback.start();
  ServiceOptions options;
  options.initial_peers = {endpoint_of(*first)};
  options.client_only = true;
  const auto client = loopback.start(options);
  REQUIRE(join(*client).has_value());
  REQUIRE(store(*client, "k", "v").has_value());
  CHECK(text_of(find(*first, "k")) == "v");
  CHECK(stats(*client).stored_records == 0);
  CHECK(stats(*first).known_nodes == 0);
}

TEST_CASE("Stopping answers what is in flight", "[dht][udp]") {
  Loopback loopback;
  ServiceOptions options;
  options.initial_peers = {{"127.0.0.1", 1}};
  options.client_only = true;
  auto service = loopback.start(options);
  std::promise<Result<void>> joined;
  service->join([&](Result<void> result) { joined.set_value(std::move(result)); });
  std::promise<Result<FindResult>> found;
  service->node().clock().post([&] {
    service->node().find(Key::of("k"), {}, [&](Result<FindResult> result) { found.set_value(std::move(result)); });
  });
  on_strand(*service, [] {});
  service->stop();
  const auto result = joined.get_future().get();
  CHECK(result.error().code == Errc::kCancelled);
  CHECK_FALSE(found.get_future().get().has_value());
}

}  // namespace
}  // namespace dmoe::dht::test
