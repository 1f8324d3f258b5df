// Calls between a real client and a real server over loopback.
#include "tests/net/rpc_fixture.hpp"
#include "tests/support/catch.hpp"

#include <atomic>
#include <mutex>

using namespace dmoe;
using namespace dmoe::test;

namespace {

std::string text_of(const Result<net::IncomingReply>& result) {
  return result.has_error() ? describe(result.error()) : "a reply";
}

}  // namespace

TEST_CASE("a call is answered with its own bytes", "[rpc]") {
  TestServer server(echo);
  TestClient client;
  auto future = client.forward(server.endpoint(), "ffn.3.17", 7, "seven words of eight bytes, and three");
  const auto reply = get(future);
  INFO(text_of(reply));
  REQUIRE(reply.has_value());
  CHECK(bytes_of(*reply) == "seven words of eight bytes, and three");
}

TEST_CASE("an error of the handler reaches the caller with code and advice", "[rpc]") {
  TestServer server([](net::IncomingCall call) { call.fail({Errc::kOverloaded, "the queue is full", 70ms}); });
  TestClient client;
  auto future = client.forward(server.endpoint(), "ffn.0.0");
  const auto reply = get(future);
  REQUIRE(reply.has_error());
  CHECK(reply.error().code == Errc::kOverloaded);
  CHECK(reply.error().message == "the queue is full");
  CHECK(reply.error().retry_after == 70ms);
}

TEST_CASE("a1 a handler that throws fails its own call and no other", "[rpc][a1]") {
  TestServer server([](net::IncomingCall call) {
    if (call.reader().getForward().getRngSeed() == 13) throw std::runtime_error("thirteen is not for this expert");
    echo(std::move(call));
  });
  TestClient client;
  auto bad = client.forward(server.endpoint(), "ffn.0.0", 13, "x");
  auto good = client.forward(server.endpoint(), "ffn.0.0", 12, "y");
  const auto failed = get(bad);
  REQUIRE(failed.has_error());
  CHECK(failed.error().code == Errc::kInternal);
  CHECK(failed.error().message == "thirteen is not for this expert");
  const auto answered = get(good);
  REQUIRE(answered.has_value());
  CHECK(bytes_of(*answered) == "y");
}

TEST_CASE("a call that the handler drops is answered with an internal error", "[rpc]") {
  TestServer server([](net::IncomingCall) {});
  TestClient client;
  auto future = client.forward(server.endpoint(), "ffn.0.0");
  const auto reply = get(future);
  REQUIRE(reply.has_error());
  CHECK(reply.error().code == Errc::kInternal);
}

TEST_CASE("calls of one start share a frame and are answered one by one", "[rpc]") {
  std::mutex mutex;
  std::vector<std::shared_ptr<const void>> frames;
  TestServer server([&](net::IncomingCall call) {
    {
      const std::lock_guard lock(mutex);
      frames.push_back(call.frame());
    }
    echo(std::move(call));
  });
  TestClient client;
  std::vector<net::CallSpec> calls;
  std::vector<std::future<Result<net::IncomingReply>>> futures;
  for (std::uint64_t i = 0; i < 5; ++i) {
    auto promise = std::make_shared<std::promise<Result<net::IncomingReply>>>();
    futures.push_back(promise->get_future());
    calls.push_back({[i](net::schema::Call::Builder call, net::Attachments&) {
                       fill_forward(call, "ffn." + std::to_string(i), i, std::string(i + 1, 'a'));
                     },
                     soon(), [promise](Result<net::IncomingReply> result) { promise->set_value(std::move(result)); }});
  }
  const auto ids = client.client().start(server.endpoint(), std::move(calls));
  CHECK(ids.size() == 5);
  for (std::size_t i = 0; i < futures.size(); ++i) {
    const auto reply = get(futures[i]);
    REQUIRE(reply.has_value());
    CHECK(bytes_of(*reply) == std::string(i + 1, 'a'));
  }
  const std::lock_guard lock(mutex);
  REQUIRE(frames.size() == 5);
  for (const auto& frame : frames) CHECK(frame == frames.front());
}

TEST_CASE("a deadline passes when the server is silent and the server learns of it", "[rpc][c20]") {
  std::mutex mutex;
  std::vector<net::IncomingCall> held;
  TestServer server([&](net::IncomingCall call) {
    const std::lock_guard lock(mutex);
    held.push_back(std::move(call));
  });
  TestClient client;
  auto future = client.forward(server.endpoint(), "ffn.3.7", 0, "x", Clock::now() + 100ms);
  const auto reply = get(future);
  REQUIRE(reply.has_error());
  CHECK(reply.error().code == Errc::kDeadlineExceeded);
  CHECK(reply.error().message.find("forward ffn.3.7 on 127.0.0.1:") == 0);
  wait_until([&] {
    const std::lock_guard lock(mutex);
    return held.size() == 1 && held.front().cancelled();
  });
  const std::lock_guard lock(mutex);
  CHECK(held.front().deadline() < Clock::now() + 100ms);
  held.clear();
}

TEST_CASE("a cancelled call ends at once and the server learns of it", "[rpc]") {
  std::mutex mutex;
  std::vector<net::IncomingCall> held;
  const auto holds_one = [&] {
    const std::lock_guard lock(mutex);
    return held.size() == 1;
  };
  TestServer server([&](net::IncomingCall call) {
    if (call.reader().getForward().getRngSeed() == 1) return echo(std::move(call));
    const std::lock_guard lock(mutex);
    held.push_back(std::move(call));
  });
  TestClient client;
  TestClient::Future future;
  const auto id = client.start_forward(server.endpoint(), "ffn.0.0", 0, "x", soon(), future);
  wait_until(holds_one);
  client.client().cancel(id);
  client.client().cancel(id);
  client.client().cancel(123'456);
  const auto reply = get(future);
  REQUIRE(reply.has_error());
  CHECK(reply.error().code == Errc::kCancelled);
  wait_until([&] {
    const std::lock_guard lock(mutex);
    return held.front().cancelled();
  });
  {
    const std::lock_guard lock(mutex);
    held.front().reply([](net::schema::Reply::Builder, net::Attachments&) { FAIL("a reply nobody wants was built"); });
    held.clear();
  }
  auto after = client.forward(server.endpoint(), "ffn.0.0", 1, "still here");
  CHECK(get(after).has_value());
}

TEST_CASE("a deadline that has passed already fails its call", "[rpc]") {
  TestServer server(echo);
  TestClient client;
  auto future = client.forward(server.endpoint(), "ffn.0.0", 0, "x", Clock::now() - 1s);
  const auto reply = get(future);
  if (reply.has_error()) CHECK(reply.error().code == Errc::kDeadlineExceeded);
}

TEST_CASE("a handler on another thread may answer in any order", "[rpc]") {
  std::mutex mutex;
  std::vector<net::IncomingCall> held;
  TestServer server([&](net::IncomingCall call) {
    const std::lock_guard lock(mutex);
    held.push_back(std::move(call));
  });
  TestClient client;
  std::vector<TestClient::Future> futures;
  for (int i = 0; i < 50; ++i) {
    futures.push_back(client.forward(server.endpoint(), "ffn.0.0", 0, "call " + std::to_string(i)));
  }
  wait_until([&] {
    const std::lock_guard lock(mutex);
    return held.size() == 50;
  });
  for (std::size_t i = 50; i-- > 0;) echo(std::move(held[i]));
  for (int i = 0; i < 50; ++i) {
    const auto reply = get(futures[static_cast<std::size_t>(i)]);
    REQUIRE(reply.has_value());
    CHECK(bytes_of(*reply) == "call " + std::to_string(i));
  }
}

TEST_CASE("calls beyond the limit of a connection are refused at once with a time to come back", "[rpc]") {
  std::mutex mutex;
  std::vector<net::IncomingCall> held;
  net::RpcServerOptions options;
  options.max_calls_per_connection = 3;
  TestServer server(
      [&](net::IncomingCall call) {
        const std::lock_guard lock(mutex);
        held.push_back(std::move(call));
      },
      options);
  TestClient client;
  std::vector<TestClient::Future> futures;
  for (int i = 0; i < 4; ++i) futures.push_back(client.forward(server.endpoint(), "ffn.0.0", 0, std::to_string(i)));
  const auto refused = get(futures[3]);
  REQUIRE(refused.has_error());
  CHECK(refused.error().code == Errc::kOverloaded);
  CHECK(refused.error().retry_after.has_value());
  {
    const std::lock_guard lock(mutex);
    for (auto& call : held) echo(std::move(call));
    held.clear();
  }
  for (int i = 0; i < 3; ++i) CHECK(get(futures[static_cast<std::size_t>(i)]).has_value());
}

TEST_CASE("a body that cannot be encoded fails its calls with the reason", "[rpc]") {
  TestServer server(echo);
  TestClient client;
  std::promise<Result<net::IncomingReply>> promise;
  auto future = promise.get_future();
  std::vector<net::CallSpec> calls;
  calls.push_back(
      {[](net::schema::Call::Builder, net::Attachments&) { throw std::invalid_argument("complex tensors"); }, soon(),
       [&](Result<net::IncomingReply> result) { promise.set_value(std::move(result)); }});
  client.client().start(server.endpoint(), std::move(calls));
  const auto reply = get(future);
  REQUIRE(reply.has_error());
  CHECK(reply.error().code == Errc::kInvalidArgument);
  CHECK(reply.error().message.find("complex tensors") != std::string::npos);
}

TEST_CASE("stop fails what is in flight and refuses what comes later", "[rpc]") {
  std::mutex mutex;
  std::vector<net::IncomingCall> held;
  TestServer server([&](net::IncomingCall call) {
    const std::lock_guard lock(mutex);
    held.push_back(std::move(call));
  });
  TestClient client;
  auto future = client.forward(server.endpoint(), "ffn.0.0");
  wait_until([&] {
    const std::lock_guard lock(mutex);
    return held.size() == 1;
  });
  client.client().stop();
  client.client().stop();
  auto late = client.forward(server.endpoint(), "ffn.0.0");
  const auto reply = get(future);
  REQUIRE(reply.has_error());
  CHECK(reply.error().code == Errc::kCancelled);
  const auto refused = get(late);
  REQUIRE(refused.has_error());
  CHECK(refused.error().code == Errc::kCancelled);
  const std::lock_guard lock(mutex);
  held.clear();
}

TEST_CASE("a server that stops accepting refuses new calls and lets old ones finish", "[rpc]") {
  std::mutex mutex;
  std::vector<net::IncomingCall> held;
  TestServer server([&](net::IncomingCall call) {
    const std::lock_guard lock(mutex);
    held.push_back(std::move(call));
  });
  TestClient client;
  auto old = client.forward(server.endpoint(), "ffn.0.0", 0, "old");
  wait_until([&] {
    const std::lock_guard lock(mutex);
    return held.size() == 1;
  });
  server.server().stop_accepting();
  auto fresh = client.forward(server.endpoint(), "ffn.0.0", 0, "fresh");
  const auto refused = get(fresh);
  REQUIRE(refused.has_error());
  CHECK(refused.error().code == Errc::kUnavailable);
  {
    const std::lock_guard lock(mutex);
    echo(std::move(held.front()));
    held.clear();
  }
  server.stop(10s);
  const auto reply = get(old);
  INFO(text_of(reply));
  REQUIRE(reply.has_value());
  CHECK(bytes_of(*reply) == "old");
}
