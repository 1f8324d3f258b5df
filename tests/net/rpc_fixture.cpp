#include "tests/net/rpc_fixture.hpp"

#include "tests/support/catch.hpp"

#include <boost/asio/post.hpp>

#include <cstring>

namespace dmoe::test {

TestServer::TestServer(net::RpcServer::CallHandler handler, net::RpcServerOptions options, int threads)
    : io_(threads), server_(std::make_unique<net::RpcServer>(io_.io(), std::move(options), std::move(handler))) {
  server_->route("/healthz", [] { return net::HttpResponse{200, "text/plain", "ok\n"}; });
  const auto listening = server_->listen();
  INFO((listening.has_error() ? describe(listening.error()) : ""));
  REQUIRE(listening.has_value());
}

TestServer::~TestServer() { stop(); }

void TestServer::stop(std::chrono::milliseconds grace) {
  auto done = std::make_shared<std::promise<void>>();
  auto stopped = done->get_future();
  server_->stop(grace, [done] { done->set_value(); });
  REQUIRE(stopped.wait_for(kPatience) == std::future_status::ready);
}

TestClient::TestClient(net::RpcClientOptions options, int threads)
    : io_(threads), client_(std::make_unique<net::RpcClient>(io_.io().get_executor(), options)) {}

TestClient::~TestClient() {
  client_.reset();
  std::promise<void> drained;  // The stop runs before io_ ends.
  boost::asio::post(io_.io(), [&drained] { drained.set_value(); });
  drained.get_future().wait();
}

void fill_forward(net::schema::Call::Builder call, const std::string& uid, std::uint64_t seed,
                  const std::string& bytes) {
  auto forward = call.initForward();
  forward.setUid(uid);
  forward.setRngSeed(seed);
  auto tensor = forward.initInputs(1)[0];
  tensor.setDtype(net::schema::DType::UINT8);
  tensor.initShape(1).set(0, static_cast<std::int64_t>(bytes.size()));
  auto data = tensor.initData(static_cast<unsigned>(bytes.size()));
  std::memcpy(data.begin(), bytes.data(), bytes.size());
}

net::CallId TestClient::start_forward(const net::Endpoint& endpoint, const std::string& uid, std::uint64_t seed,
                                      const std::string& bytes, Clock::time_point deadline, Future& future) {
  auto promise = std::make_shared<std::promise<Result<net::IncomingReply>>>();
  future = promise->get_future();
  std::vector<net::CallSpec> calls;
  calls.push_back({[&](net::schema::Call::Builder call, net::Attachments&) { fill_forward(call, uid, seed, bytes); },
                   deadline, [promise](Result<net::IncomingReply> result) { promise->set_value(std::move(result)); }});
  return client_->start(endpoint, std::move(calls)).front();
}

TestClient::Future TestClient::forward(const net::Endpoint& endpoint, const std::string& uid, std::uint64_t seed,
                                       const std::string& bytes, Clock::time_point deadline) {
  Future future;
  start_forward(endpoint, uid, seed, bytes, deadline, future);
  return future;
}

void echo(net::IncomingCall call) {
  call.reply([&](net::schema::Reply::Builder reply, net::Attachments&) {
    reply.setForward(call.reader().getForward().getInputs());
  });
}

std::string bytes_of(const net::IncomingReply& reply) {
  const auto data = reply.reader().getForward()[0].getData();
  return {reinterpret_cast<const char*>(data.begin()), data.size()};
}

Result<net::IncomingReply> get(TestClient::Future& future) {
  REQUIRE(future.wait_for(kPatience) == std::future_status::ready);
  return future.get();
}

void wait_until(const std::function<bool()>& condition) {
  const auto end = soon();
  while (!condition()) {
    if (Clock::now() >= end) FAIL("what the test waits for did not happen");
    std::this_thread::yield();
  }
}

}  // namespace dmoe::test
