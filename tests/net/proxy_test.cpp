// Calls through a proxy that cuts idle connections.
#include "net/metrics.hpp"
#include "testbed/network_relay.hpp"
#include "tests/net/raw_peer.hpp"
#include "tests/net/rpc_fixture.hpp"
#include "tests/support/catch.hpp"

#include <prometheus/counter.h>

#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/websocket/stream.hpp>

using namespace dmoe;
using namespace dmoe::test;

namespace {

/// As nginx is one for WebSockets: it passes bytes on, and cuts connections that say nothing for a while.
class Proxy {
 public:
  Proxy(const TestServer& server, std::chrono::milliseconds cut_after) {
    testbed::LinkConditions conditions;
    conditions.cut_after = cut_after;
    relay_.set(conditions);
    relay_.start({server.endpoint().port});
  }

  net::Endpoint endpoint() const { return {"127.0.0.1", relay_.port(0)}; }
  testbed::RelayCounts counts() const { return relay_.counts(); }

 private:
  testbed::NetworkRelay relay_{1, seed()};
};

}  // namespace

TEST_CASE("e13 by default both sides ping before a proxy's usual sixty seconds are over", "[proxy][e13]") {
  CHECK(net::RpcClientOptions{}.keepalive < 60s);
  // The server's turn comes only if the client's ping does not.
  CHECK(net::RpcServerOptions{}.idle_timeout / 2 <= 60s);
}

TEST_CASE("e13 an idle client pings", "[proxy][e13]") {
  RawListener listener;
  net::RpcClientOptions options;
  options.keepalive = 150ms;
  TestClient client(options);
  auto unanswered = client.forward({"127.0.0.1", listener.port()}, "ffn.0.0", 0, "x");
  namespace websocket = boost::beast::websocket;
  websocket::stream<boost::asio::ip::tcp::socket> peer(listener.accept());
  peer.set_option(websocket::stream_base::decorator([](websocket::response_type& response) {
    response.set(boost::beast::http::field::sec_websocket_protocol, "dmoe.1");
  }));
  peer.accept();
  int pings = 0;
  peer.control_callback([&](websocket::frame_type kind, boost::beast::string_view) {
    if (kind == websocket::frame_type::ping && ++pings == 3)
      peer.next_layer().shutdown(peer.next_layer().shutdown_both);
  });
  boost::system::error_code end;
  while (!end) {  // Answers the pings that it reads.
    boost::beast::flat_buffer buffer;
    peer.read(buffer, end);
  }
  CHECK(pings == 3);
  CHECK(get(unanswered).has_error());
}

TEST_CASE("e13 a connection through a proxy outlives its idle time and still carries calls", "[proxy][e13]") {
  net::Metrics metrics;
  net::RpcServerOptions server_options;
  server_options.metrics = &metrics;
  TestServer server(echo, server_options);
  constexpr auto kCutAfter = 1'500ms;
  constexpr auto kPing = 300ms;
  const Proxy proxy(server, kCutAfter);
  net::RpcClientOptions options;
  options.keepalive = kPing;
  TestClient client(options);
  auto first = client.forward(proxy.endpoint(), "ffn.0.0", 0, "x");
  CHECK(get(first).has_value());
  // So many pings take longer than the proxy waits.
  const auto before = proxy.counts().control;
  constexpr std::uint64_t kPings = kCutAfter / kPing + 3;
  wait_until([&] { return proxy.counts().control >= before + 2 * kPings; });  // Each is answered.
  auto second = client.forward(proxy.endpoint(), "ffn.0.0", 0, "y");
  const auto reply = get(second);
  REQUIRE(reply.has_value());
  CHECK(bytes_of(*reply) == "y");
  CHECK(proxy.counts().cut == 0);
  CHECK(proxy.counts().connections == 1);
  CHECK(metrics.counter("dmoe_rpc_connections_accepted_total", "").Value() == 1);
}

TEST_CASE("e13 sixty-four mebibytes pass a proxy both ways", "[proxy][e13][a12]") {
  TestServer server(echo);
  const Proxy proxy(server, 60s);
  TestClient client;
  std::string bytes(64UL << 20U, 'x');
  bytes.front() = 'a';
  bytes.back() = 'z';
  auto future = client.forward(proxy.endpoint(), "ffn.0.0", 0, bytes);
  const auto reply = get(future);
  INFO((reply.has_error() ? describe(reply.error()) : ""));
  REQUIRE(reply.has_value());
  CHECK(bytes_of(*reply) == bytes);
  CHECK(proxy.counts().bytes > 2 * bytes.size());
}

TEST_CASE("e13 a connection that a proxy cut is opened anew for the next call", "[proxy][e13]") {
  TestServer server(echo);
  const Proxy proxy(server, 100ms);  // Below the client's ping.
  net::RpcClientOptions options;
  options.first_backoff = 1ms;
  TestClient client(options);
  const auto answered = [&] {  // On a slow machine a call may be cut too.
    auto future = client.forward(proxy.endpoint(), "ffn.0.0", 0, "x");
    return get(future).has_value();
  };
  wait_until(answered);
  wait_until([&] { return proxy.counts().cut > 0; });
  wait_until(answered);
  CHECK(proxy.counts().connections >= 2);
}
