// Plain HTTP on the calls' port, and the handshake that turns it into calls.
#include "net/metrics.hpp"
#include "tests/net/raw_peer.hpp"
#include "tests/net/rpc_fixture.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/text.hpp"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>

#include <random>

using namespace dmoe;
using namespace dmoe::test;

namespace {

std::string ask(const TestServer& server, std::string_view request) {
  RawConnection connection(server.endpoint().port);
  connection.send(request);
  return connection.read_to_end();
}

}  // namespace

TEST_CASE("a GET is answered by the route of its path", "[http]") {
  TestServer server(echo);
  const auto answer = ask(server, "GET /healthz?probe=1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
  CHECK(answer.starts_with("HTTP/1.1 200 OK\r\n"));
  CHECK(contains(answer, "Content-Length: 3\r\n"));
  CHECK(answer.ends_with("\r\n\r\nok\n"));
}

TEST_CASE("HEAD has the header of GET and no body", "[http]") {
  TestServer server(echo);
  const auto answer = ask(server, "HEAD /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
  CHECK(answer.starts_with("HTTP/1.1 200 OK\r\n"));
  CHECK(contains(answer, "Content-Length: 3\r\n"));
  CHECK(answer.ends_with("\r\n\r\n"));
}

TEST_CASE("unknown paths and methods are refused with what there is", "[http][f10]") {
  TestServer server(echo);
  const auto lost = ask(server, "GET /nowhere HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
  CHECK(lost.starts_with("HTTP/1.1 404 "));
  CHECK(contains(lost, "/healthz"));
  const auto post =
      ask(server, "POST /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi");
  CHECK(post.starts_with("HTTP/1.1 405 "));
  CHECK(contains(post, "Allow: GET, HEAD\r\n"));
  CHECK(ask(server, "GET /rpc HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").starts_with("HTTP/1.1 426 "));
}

TEST_CASE("one connection serves several requests and then calls are still possible", "[http]") {
  TestServer server(echo);
  RawConnection connection(server.endpoint().port);
  for (int i = 0; i < 3; ++i) {
    connection.send("GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n");
    CHECK(connection.read_until("ok\n").starts_with("HTTP/1.1 200 OK\r\n"));
  }
  TestClient client;
  auto future = client.forward(server.endpoint(), "ffn.0.0", 0, "x");
  CHECK(get(future).has_value());
}

TEST_CASE("oversized requests are refused and the connection ends", "[http]") {
  TestServer server(echo);
  const auto header = ask(server, "GET / HTTP/1.1\r\nX: " + std::string(100'000, 'x') + "\r\n\r\n");
  CHECK(header.starts_with("HTTP/1.1 431 "));
  const auto body = ask(server, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999\r\n\r\nabc");
  CHECK(body.starts_with("HTTP/1.1 413 "));
}

TEST_CASE("a route that throws is an error page", "[http]") {
  IoThreads io;
  net::RpcServer server(io.io(), {}, echo);
  server.route("/boom", []() -> net::HttpResponse { throw std::runtime_error("the gauge is broken"); });
  server.route("/teapot", [] { return net::HttpResponse{503, "application/json", "{}"}; });
  REQUIRE(server.listen().has_value());
  RawConnection connection(server.port());
  connection.send("GET /boom HTTP/1.1\r\nHost: x\r\n\r\n");
  CHECK(contains(connection.read_until("broken\n"), "HTTP/1.1 500 "));
  connection.send("GET /teapot HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
  const auto answer = connection.read_to_end();
  CHECK(answer.starts_with("HTTP/1.1 503 "));
  CHECK(contains(answer, "Content-Type: application/json\r\n"));
}

TEST_CASE("garbage on the port costs its sender the connection and nothing else", "[http]") {
  TestServer server(echo);
  std::mt19937_64 random(seed());
  for (int i = 0; i < 50; ++i) {
    std::string bytes(1 + random() % 5'000, '\0');
    for (auto& byte : bytes) byte = static_cast<char>(random());
    RawConnection connection(server.endpoint().port);
    connection.send(bytes + "\r\n\r\n");
    (void)connection.read_to_end();
  }
  const auto tls = ask(server, std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11) + "\r\n\r\n");
  CHECK(tls.starts_with("HTTP/1.1 400 "));
  TestClient client;
  auto future = client.forward(server.endpoint(), "ffn.0.0", 0, "x");
  CHECK(get(future).has_value());
}

TEST_CASE("e19 a client of another version is refused with both versions", "[http][e19]") {
  TestServer server(echo);
  RawWebSocket newer(server.endpoint().port, "dmoe.2");
  CHECK(newer.status() == 426);
  CHECK(contains(newer.body(), "dmoe.1"));
  CHECK(contains(newer.body(), "dmoe.2"));
  RawWebSocket nameless(server.endpoint().port, "");
  CHECK(nameless.status() == 426);
  CHECK(RawWebSocket(server.endpoint().port, "dmoe.2, dmoe.1").status() == 101);
}

TEST_CASE("e19 a server of another version is named in the error of the call", "[http][e19]") {
  RawListener listener;
  std::thread other([&] {
    auto socket = listener.accept();
    std::string request;
    boost::asio::io_context io;
    boost::system::error_code ignored;
    std::array<char, 4096> buffer{};
    while (request.find("\r\n\r\n") == std::string::npos) {
      const auto got = socket.read_some(boost::asio::buffer(buffer), ignored);
      if (ignored) return;
      request.append(buffer.data(), got);
    }
    const std::string body = "this server speaks dmoe.2, the client speaks dmoe.1\n";
    const std::string answer =
        "HTTP/1.1 426 Upgrade Required\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
    (void)socket.write_some(boost::asio::buffer(answer), ignored);
    (void)socket.read_some(boost::asio::buffer(buffer), ignored);
  });
  TestClient client;
  auto future = client.forward({"127.0.0.1", listener.port()}, "ffn.0.0");
  const auto reply = get(future);
  other.join();
  REQUIRE(reply.has_error());
  CHECK(reply.error().code == Errc::kUnavailable);
  CHECK(contains(reply.error().message, "dmoe.1"));
  CHECK(contains(reply.error().message, "dmoe.2"));
}

TEST_CASE("a silent client is dropped after the handshake timeout", "[http]") {
  net::RpcServerOptions options;
  options.handshake_timeout = 50ms;
  TestServer server(echo, options);
  RawConnection silent(server.endpoint().port);
  CHECK(silent.read_to_end().empty());
  RawConnection half(server.endpoint().port);
  half.send("GET /healthz HTT");
  CHECK(half.read_to_end().empty());
}

TEST_CASE("the port is named when it is taken and is free at once after stop", "[http][b21]") {
  TestServer first(echo);
  net::RpcServerOptions options;
  options.listen = first.endpoint();
  IoThreads io;
  net::RpcServer second(io.io(), options, echo);
  const auto taken = second.listen();
  REQUIRE(taken.has_error());
  CHECK(taken.error().code == Errc::kUnavailable);
  CHECK(contains(taken.error().message, to_string(first.endpoint())));
  CHECK(contains(taken.error().message, "in use"));
  {
    TestClient client;
    auto future = client.forward(first.endpoint(), "ffn.0.0", 0, "x");
    CHECK(get(future).has_value());
  }
  first.stop();
  TestServer third(echo, options);
  CHECK(third.endpoint() == options.listen);
}

TEST_CASE("a server that cannot resolve its address says so", "[http]") {
  IoThreads io;
  net::RpcServerOptions options;
  options.listen = {"203.0.113.77", 0};
  net::RpcServer server(io.io(), options, echo);
  const auto listening = server.listen();
  REQUIRE(listening.has_error());
  CHECK(contains(listening.error().message, "203.0.113.77"));
}

TEST_CASE("metrics count connections calls and bytes", "[http][metrics]") {
  net::Metrics metrics;
  net::RpcServerOptions options;
  options.metrics = &metrics;
  IoThreads io;
  net::RpcServer server(io.io(), options, [](net::IncomingCall call) {
    if (call.reader().getForward().getRngSeed() == 1) return call.fail({Errc::kNotFound, "no such expert", {}});
    echo(std::move(call));
  });
  server.route("/metrics", net::metrics_route(metrics));
  REQUIRE(server.listen().has_value());
  TestClient client;
  for (const std::uint64_t seed : {0, 0, 1}) {
    auto future = client.forward({"127.0.0.1", server.port()}, "ffn.0.0", seed, "x");
    (void)get(future);
  }
  RawConnection connection(server.port());
  connection.send("GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
  const auto page = connection.read_to_end();
  CHECK(contains(page, "Content-Type: text/plain; version=0.0.4"));
  CHECK(contains(page, "dmoe_rpc_calls_total{outcome=\"ok\"} 2\n"));
  CHECK(contains(page, "dmoe_rpc_calls_total{outcome=\"notFound\"} 1\n"));
  CHECK(contains(page, "dmoe_rpc_connections 2\n"));
  CHECK(contains(page, "dmoe_rpc_connections_accepted_total 2\n"));
  CHECK_FALSE(contains(page, "dmoe_rpc_received_bytes_total 0\n"));
}

TEST_CASE("a metrics registry gives the same object for the same name and labels", "[metrics]") {
  net::Metrics metrics;
  auto& counter = metrics.counter("dmoe_test_total", "A test.", {{"expert", "ffn.0.0"}});
  counter.Increment();
  CHECK(&metrics.counter("dmoe_test_total", "A test.", {{"expert", "ffn.0.0"}}) == &counter);
  CHECK(&metrics.counter("dmoe_test_total", "A test.", {{"expert", "ffn.0.1"}}) != &counter);
  auto& gauge = metrics.gauge("dmoe_test_depth", "Set when asked.");
  metrics.before_serialize([&] { gauge.Set(42); });
  metrics.histogram("dmoe_test_seconds", "Time.", {0.1, 1}).Observe(0.5);
  const auto text = metrics.serialize();
  CHECK(contains(text, "dmoe_test_total{expert=\"ffn.0.0\"} 1\n"));
  CHECK(contains(text, "dmoe_test_depth 42\n"));
  CHECK(contains(text, "dmoe_test_seconds_bucket{le=\"1\"} 1\n"));
}
