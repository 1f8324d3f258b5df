// Connections that fail, idle, die and come back.
#include "net/metrics.hpp"
#include "tests/net/raw_peer.hpp"
#include "tests/net/rpc_fixture.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/text.hpp"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>

#include <atomic>
#include <mutex>
#include <optional>

using namespace dmoe;
using namespace dmoe::test;

namespace {

std::uint16_t unused_port() {
  RawListener listener;
  return listener.port();
}

double value_of(net::Metrics& metrics, const std::string& gauge) { return metrics.gauge(gauge, "").Value(); }
double accepted(net::Metrics& metrics) { return metrics.counter("dmoe_rpc_connections_accepted_total", "").Value(); }

}  // namespace

TEST_CASE("a refused connection fails its calls at once and backs off", "[connection][c20]") {
  net::RpcClientOptions options;
  options.first_backoff = 60s;
  options.max_backoff = 60s;
  TestClient client(options);
  const net::Endpoint nobody{"127.0.0.1", unused_port()};
  auto first = client.forward(nobody, "ffn.3.7");
  const auto refused = get(first);
  REQUIRE(refused.has_error());
  CHECK(refused.error().code == Errc::kUnavailable);
  CHECK(contains(refused.error().message, "forward ffn.3.7"));
  CHECK(contains(refused.error().message, to_string(nobody)));
  CHECK(contains(refused.error().message, "refused"));
  auto second = client.forward(nobody, "ffn.3.7");
  const auto waiting = get(second);
  REQUIRE(waiting.has_error());
  CHECK(waiting.error().code == Errc::kUnavailable);
  CHECK(contains(waiting.error().message, "next attempt"));
}

TEST_CASE("c20 a peer that accepts and says nothing costs the connect timeout and not the call's",
          "[connection][c20]") {
  RawListener black_hole;  // The kernel accepts, nobody reads.
  net::RpcClientOptions options;
  options.connect_timeout = 80ms;
  TestClient client(options);
  auto future = client.forward({"127.0.0.1", black_hole.port()}, "ffn.0.0", 0, "x", Clock::now() + 1h);
  const auto reply = get(future);
  REQUIRE(reply.has_error());
  CHECK(reply.error().code == Errc::kUnavailable);
  CHECK(contains(reply.error().message, "80 ms (connect_timeout)"));
}

TEST_CASE("a call's own deadline ends it while its connection is still being dialled", "[connection]") {
  RawListener black_hole;
  TestClient client;
  auto future = client.forward({"127.0.0.1", black_hole.port()}, "ffn.0.0", 0, "x", Clock::now() + 50ms);
  const auto reply = get(future);
  REQUIRE(reply.has_error());
  CHECK(reply.error().code == Errc::kDeadlineExceeded);
}

TEST_CASE("b27 a host name is resolved and its addresses are tried in turn", "[connection][b20][b27]") {
  TestServer server(echo);  // On 127.0.0.1; localhost may also be ::1, where nobody listens.
  TestClient client;
  auto future = client.forward({"localhost", server.endpoint().port}, "ffn.0.0", 0, "x");
  CHECK(get(future).has_value());
  auto lost = client.forward({"no-such-host.invalid", 1}, "ffn.0.0");
  const auto reply = get(lost);
  REQUIRE(reply.has_error());
  CHECK(reply.error().code == Errc::kUnavailable);
  CHECK(contains(reply.error().message, "no-such-host.invalid"));
}

TEST_CASE("a client finds its server again after a restart on the same port", "[connection]") {
  std::optional<TestServer> server(std::in_place, echo);
  net::RpcServerOptions same;
  same.listen = server->endpoint();
  net::RpcClientOptions options;
  options.first_backoff = 1ms;
  options.max_backoff = 1ms;
  TestClient client(options);
  for (int restart = 0; restart < 5; ++restart) {
    auto before = client.forward(same.listen, "ffn.0.0", 0, "before");
    CHECK(get(before).has_value());
    server.emplace(echo, same);
    // The end of the old connection may be seen by a call or before it.
    wait_until([&] {
      auto after = client.forward(same.listen, "ffn.0.0", 0, "after");
      const auto reply = get(after);
      if (reply.has_error()) CHECK(reply.error().code == Errc::kUnavailable);
      return reply.has_value();
    });
  }
}

TEST_CASE("calls in flight fail at once when their server goes", "[connection]") {
  std::atomic<int> held_count{0};
  std::vector<net::IncomingCall> held;
  std::optional<TestServer> server(std::in_place, [&](net::IncomingCall call) {
    held.push_back(std::move(call));
    ++held_count;
  });
  TestClient client;
  std::vector<TestClient::Future> futures;
  for (int i = 0; i < 10; ++i) futures.push_back(client.forward(server->endpoint(), "ffn.0.0"));
  wait_until([&] { return held_count == 10; });
  server->stop();
  for (auto& future : futures) {
    const auto reply = get(future);
    REQUIRE(reply.has_error());
    CHECK(reply.error().code == Errc::kUnavailable);
  }
  for (const auto& call : held) CHECK(call.cancelled());
  held.clear();
}

TEST_CASE("a14 an idle connection stays open and serves the next call", "[connection][a14]") {
  net::Metrics metrics;
  net::RpcServerOptions server_options;
  server_options.idle_timeout = 1'000ms;  // A busy machine delays threads by tenths of a second.
  server_options.metrics = &metrics;
  TestServer server(echo, server_options);
  net::RpcClientOptions options;
  options.keepalive = 400ms;
  TestClient client(options);
  auto first = client.forward(server.endpoint(), "ffn.0.0", 0, "x");
  CHECK(get(first).has_value());
  const auto later = Clock::now() + 2 * server_options.idle_timeout;
  wait_until([&] { return Clock::now() >= later; });
  auto second = client.forward(server.endpoint(), "ffn.0.0", 0, "x");
  CHECK(get(second).has_value());
  CHECK(accepted(metrics) == 1);
}

TEST_CASE("a14 a peer that stops answering is noticed without a deadline", "[connection][a14]") {
  RawListener listener;
  std::promise<void> end;
  std::thread stopped([&] {  // As after SIGSTOP: the kernel acknowledges, the program reads nothing.
    boost::beast::websocket::stream<boost::asio::ip::tcp::socket> ws(listener.accept());
    ws.set_option(boost::beast::websocket::stream_base::decorator([](boost::beast::websocket::response_type& response) {
      response.set(boost::beast::http::field::sec_websocket_protocol, "dmoe.1");
    }));
    boost::system::error_code ignored;
    ws.accept(ignored);
    end.get_future().wait();
  });
  net::RpcClientOptions options;
  options.keepalive = 50ms;
  TestClient client(options);
  auto small = client.forward({"127.0.0.1", listener.port()}, "ffn.0.0", 0, "x", Clock::time_point::max());
  const auto reply = get(small);
  REQUIRE(reply.has_error());
  CHECK(reply.error().code == Errc::kUnavailable);
  CHECK(contains(reply.error().message, "no sign of life"));
  end.set_value();
  stopped.join();
}

TEST_CASE("a14 a peer that stops reading in the middle of a large call is noticed", "[connection][a14]") {
  RawListener listener;
  std::promise<void> end;
  std::thread stopped([&] {
    boost::beast::websocket::stream<boost::asio::ip::tcp::socket> ws(listener.accept());
    ws.set_option(boost::beast::websocket::stream_base::decorator([](boost::beast::websocket::response_type& response) {
      response.set(boost::beast::http::field::sec_websocket_protocol, "dmoe.1");
    }));
    boost::system::error_code ignored;
    ws.accept(ignored);
    end.get_future().wait();
  });
  net::RpcClientOptions options;
  options.keepalive = 50ms;
  TestClient client(options);
  auto large = client.forward({"127.0.0.1", listener.port()}, "ffn.0.0", 0, std::string(64UL << 20U, 'x'),
                              Clock::time_point::max());
  const auto reply = get(large);
  REQUIRE(reply.has_error());
  CHECK(reply.error().code == Errc::kUnavailable);
  end.set_value();
  stopped.join();
}

TEST_CASE("a14 a server drops a client that stops answering", "[connection][a14]") {
  net::Metrics metrics;
  net::RpcServerOptions options;
  options.idle_timeout = 100ms;
  options.metrics = &metrics;
  TestServer server(echo, options);
  RawWebSocket stopped(server.endpoint().port);
  REQUIRE(stopped.status() == 101);
  wait_until([&] { return value_of(metrics, "dmoe_rpc_connections") == 0; });
}

TEST_CASE("an idle client closes its connection and opens another for the next call", "[connection]") {
  net::Metrics metrics;
  net::RpcServerOptions server_options;
  server_options.metrics = &metrics;
  TestServer server(echo, server_options);
  net::RpcClientOptions options;
  options.idle_timeout = 40ms;
  TestClient client(options);
  for (int i = 1; i <= 3; ++i) {
    auto future = client.forward(server.endpoint(), "ffn.0.0", 0, "x");
    CHECK(get(future).has_value());
    wait_until([&] { return value_of(metrics, "dmoe_rpc_connections") == 0; });
    CHECK(accepted(metrics) == i);
  }
}

TEST_CASE("large calls take a connection of their own", "[connection]") {
  net::Metrics metrics;
  net::RpcServerOptions server_options;
  server_options.metrics = &metrics;
  TestServer server(echo, server_options);
  TestClient client;
  auto small = client.forward(server.endpoint(), "ffn.0.0", 0, "x");
  CHECK(get(small).has_value());
  CHECK(accepted(metrics) == 1);
  auto large = client.forward(server.endpoint(), "ffn.0.0", 0, std::string(1UL << 20U, 'x'));
  CHECK(get(large).has_value());
  CHECK(accepted(metrics) == 2);
}

TEST_CASE("a large call does not wait for the connection of its own to open", "[connection]") {
  std::vector<net::IncomingCall> held;
  std::mutex mutex;
  net::RpcServerOptions server_options;
  server_options.max_connections = 1;
  TestServer server(
      [&](net::IncomingCall call) {
        const std::lock_guard lock(mutex);
        held.push_back(std::move(call));
      },
      server_options);
  TestClient client;
  auto small = client.forward(server.endpoint(), "ffn.0.0", 0, "x");
  wait_until([&] {
    const std::lock_guard lock(mutex);
    return held.size() == 1;
  });
  // The server has no room for a second connection while the first is in use.
  auto large = client.forward(server.endpoint(), "ffn.0.0", 0, std::string(300'000, 'x'));
  auto again = client.forward(server.endpoint(), "ffn.0.0", 0, std::string(300'000, 'y'));
  auto too_large = client.forward(server.endpoint(), "ffn.0.0", 0, std::string(1UL << 20U, 'x'));
  CHECK(get(too_large).has_error());
  wait_until([&] {
    const std::lock_guard lock(mutex);
    return held.size() == 3;
  });
  for (auto& call : held) echo(std::move(call));
  CHECK(get(small).has_value());
  CHECK(get(large).has_value());
  CHECK(get(again).has_value());
}

TEST_CASE("a12 tensors beyond sixteen mebibytes pass both ways", "[connection][a12]") {
  TestServer server(echo);
  TestClient client;
  for (const std::size_t size : {(16UL << 20U) + 1, 64UL << 20U}) {
    std::string bytes(size, 'x');
    bytes.back() = 'y';
    auto future = client.forward(server.endpoint(), "ffn.0.0", 0, bytes);
    const auto reply = get(future);
    INFO((reply.has_error() ? describe(reply.error()) : ""));
    REQUIRE(reply.has_value());
    CHECK(bytes_of(*reply) == bytes);
  }
}

TEST_CASE("a12 a call over the cap fails before it is sent and names size limit and option", "[connection][a12]") {
  TestServer server(echo);
  net::RpcClientOptions options;
  options.max_frame_bytes = 1UL << 20U;
  TestClient client(options);
  auto large = client.forward(server.endpoint(), "ffn.0.0", 0, std::string(1UL << 20U, 'x'));
  const auto reply = get(large);
  REQUIRE(reply.has_error());
  CHECK(reply.error().code == Errc::kInvalidArgument);
  CHECK(contains(reply.error().message, "1048576"));
  CHECK(contains(reply.error().message, "max_frame_bytes"));
  auto small = client.forward(server.endpoint(), "ffn.0.0", 0, "x");
  CHECK(get(small).has_value());
}

TEST_CASE("a12 a call over the server's cap ends its connection with the reason", "[connection][a12]") {
  net::RpcServerOptions options;
  options.max_frame_bytes = 1UL << 20U;
  TestServer server(echo, options);
  TestClient client;
  auto large = client.forward(server.endpoint(), "ffn.0.0", 0, std::string(2UL << 20U, 'x'));
  const auto reply = get(large);
  REQUIRE(reply.has_error());
  CHECK(reply.error().code == Errc::kUnavailable);
  auto small = client.forward(server.endpoint(), "ffn.0.0", 0, "x");
  CHECK(get(small).has_value());
}

TEST_CASE("a12 a reply over the cap becomes an error that names the limit", "[connection][a12]") {
  net::RpcServerOptions options;
  options.max_frame_bytes = 1UL << 20U;
  TestServer server(
      [](net::IncomingCall call) {
        call.reply(
            [](net::schema::Reply::Builder reply, net::Attachments&) { reply.initForward(1)[0].initData(2U << 20U); });
      },
      options);
  TestClient client;
  auto future = client.forward(server.endpoint(), "ffn.0.0", 0, "x");
  const auto reply = get(future);
  REQUIRE(reply.has_error());
  CHECK(reply.error().code == Errc::kInvalidArgument);
  CHECK(contains(reply.error().message, "max_frame_bytes"));
}

TEST_CASE("a12 a reply over the client's own cap fails the call", "[connection][a12]") {
  TestServer server([](net::IncomingCall call) {
    call.reply(
        [](net::schema::Reply::Builder reply, net::Attachments&) { reply.initForward(1)[0].initData(2U << 20U); });
  });
  net::RpcClientOptions options;
  options.max_frame_bytes = 1UL << 20U;
  TestClient client(options);
  auto future = client.forward(server.endpoint(), "ffn.0.0", 0, "x");
  const auto reply = get(future);
  REQUIRE(reply.has_error());
  CHECK(reply.error().code == Errc::kUnavailable);
}

TEST_CASE("a full server closes its oldest idle connection for a new one", "[connection]") {
  net::Metrics metrics;
  net::RpcServerOptions options;
  options.max_connections = 2;
  options.metrics = &metrics;
  TestServer server(echo, options);
  RawWebSocket oldest(server.endpoint().port);
  RawWebSocket newer(server.endpoint().port);
  TestClient client;
  auto future = client.forward(server.endpoint(), "ffn.0.0", 0, "x");
  CHECK(get(future).has_value());
  CHECK(oldest.read().empty());  // Closed.
  CHECK(value_of(metrics, "dmoe_rpc_connections") == 2);
}

TEST_CASE("a full server without idle connections refuses the new one", "[connection]") {
  net::RpcServerOptions options;
  options.max_connections = 1;
  std::atomic<int> held_count{0};
  std::vector<net::IncomingCall> held;
  TestServer server(
      [&](net::IncomingCall call) {
        held.push_back(std::move(call));
        ++held_count;
      },
      options);
  TestClient first;
  auto busy = first.forward(server.endpoint(), "ffn.0.0", 0, "x");
  wait_until([&] { return held_count == 1; });
  TestClient second;
  auto refused = second.forward(server.endpoint(), "ffn.0.0", 0, "x");
  const auto reply = get(refused);
  REQUIRE(reply.has_error());
  CHECK(reply.error().code == Errc::kUnavailable);
  echo(std::move(held.front()));
  CHECK(get(busy).has_value());
}

TEST_CASE("more bytes than the queue may hold are refused here and now", "[connection]") {
  RawListener black_hole;
  net::RpcClientOptions options;
  options.max_queued_bytes = 100'000;
  TestClient client(options);
  const net::Endpoint endpoint{"127.0.0.1", black_hole.port()};
  auto first = client.forward(endpoint, "ffn.0.0", 0, std::string(60'000, 'x'), Clock::now() + 100ms);
  auto second = client.forward(endpoint, "ffn.0.0", 0, std::string(60'000, 'x'));
  const auto refused = get(second);
  REQUIRE(refused.has_error());
  CHECK(refused.error().code == Errc::kOverloaded);
  CHECK(contains(refused.error().message, "max_queued_bytes"));
  (void)get(first);
}
