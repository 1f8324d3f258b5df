// Completion tokens and the blocking facade.
#include "dht/async.hpp"
#include "dht/blocking.hpp"
#include "tests/dht/service_fixture.hpp"
#include "tests/support/catch.hpp"

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/use_future.hpp>

namespace dmoe::dht::test {
namespace {

using namespace std::chrono_literals;

StoreRequest request(const std::string& key, const std::string& value) {
  return {Key::of(key), {}, {value.begin(), value.end()}, 60s, false};
}

boost::asio::awaitable<std::string> store_and_find(Node& node) {
  const auto stored = co_await async_store(node, request("a", "b"), boost::asio::use_awaitable);
  if (!stored.has_value()) co_return describe(stored.error());
  co_return text_of(co_await async_find(node, Key::of("a"), FindOptions{}, boost::asio::use_awaitable));
}

TEST_CASE("Operations are awaited from a coroutine", "[dht][udp]") {
  Loopback loopback;
  const auto service = loopback.start();
  auto result = boost::asio::co_spawn(loopback.io(), store_and_find(service->node()), boost::asio::use_future);
  CHECK(result.get() == "b");
}

TEST_CASE("Operations are waited for by a thread", "[dht][udp]") {
  Loopback loopback;
  const auto service = loopback.start();
  BlockingDht dht(service->node());
  REQUIRE(dht.store(request("a", "b")).has_value());
  CHECK(text_of(dht.find(Key::of("a"))) == "b");
  REQUIRE(dht.withdraw(Key::of("a"), {}, 60s).has_value());
  CHECK(dht.find(Key::of("a"))->records.empty());
}

}  // namespace
}  // namespace dmoe::dht::test
