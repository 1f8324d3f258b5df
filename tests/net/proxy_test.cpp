// Calls through a proxy that cuts idle connections.
#include "net/metrics.hpp"
#include "tests/net/raw_peer.hpp"
#include "tests/net/relay.hpp"
#include "tests/net/rpc_fixture.hpp"
#include "tests/support/catch.hpp"

#include <prometheus/counter.h>

#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/websocket/stream.hpp>

using namespace dmoe;
using namespace dmoe::test;

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
  Relay relay(server.endpoint().port, kCutAfter);
  net::RpcClientOptions options;
  options.keepalive = kPing;
  TestClient client(options);
  const net::Endpoint proxy{"127.0.0.1", relay.port()};
  auto first = client.forward(proxy, "ffn.0.0", 0, "x");
  CHECK(get(first).has_value());
  // So many pings take longer than the proxy waits.
  const auto before = relay.pieces_to_target();
  wait_until([&] { return relay.pieces_to_target() >= before + kCutAfter / kPing + 3; });
  auto second = client.forward(proxy, "ffn.0.0", 0, "y");
  const auto reply = get(second);
  REQUIRE(reply.has_value());
  CHECK(bytes_of(*reply) == "y");
  CHECK(relay.cut() == 0);
  CHECK(relay.connections() == 1);
  CHECK(metrics.counter("dmoe_rpc_connections_accepted_total", "").Value() == 1);
}

TEST_CASE("e13 sixty-four mebibytes pass a proxy both ways", "[proxy][e13][a12]") {
  TestServer server(echo);
  Relay relay(server.endpoint().port, 60s);
  TestClient client;
  std::string bytes(64UL << 20U, 'x');
  bytes.front() = 'a';
  bytes.back() = 'z';
  auto future = client.forward({"127.0.0.1", relay.port()}, "ffn.0.0", 0, bytes);
  const auto reply = get(future);
  INFO((reply.has_error() ? describe(reply.error()) : ""));
  REQUIRE(reply.has_value());
  CHECK(bytes_of(*reply) == bytes);
  CHECK(relay.bytes_to_target() > bytes.size());
}

TEST_CASE("e13 a connection that a proxy cut is opened anew for the next call", "[proxy][e13]") {
  TestServer server(echo);
  Relay relay(server.endpoint().port, 100ms);  // Below the client's ping.
  net::RpcClientOptions options;
  options.first_backoff = 1ms;
  TestClient client(options);
  const net::Endpoint proxy{"127.0.0.1", relay.port()};
  const auto answered = [&] {  // On a slow machine a call may be cut too.
    auto future = client.forward(proxy, "ffn.0.0", 0, "x");
    return get(future).has_value();
  };
  wait_until(answered);
  wait_until([&] { return relay.cut() > 0; });
  wait_until(answered);
  CHECK(relay.connections() >= 2);
}
