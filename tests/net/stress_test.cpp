// Many calls, many threads, and ends in the middle: each call ends exactly once.
#include "net/metrics.hpp"
#include "tests/net/raw_peer.hpp"
#include "tests/net/rpc_fixture.hpp"
#include "tests/support/catch.hpp"

#include <capnp/serialize.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <random>

using namespace dmoe;
using namespace dmoe::test;

namespace {

/// Answers calls on threads of its own, a random one of those that wait.
class Workers {
 public:
  explicit Workers(int threads) {
    for (int i = 0; i < threads; ++i)
      threads_.emplace_back([this, i] { work(seed() + static_cast<std::uint64_t>(i)); });
  }
  ~Workers() {
    {
      const std::lock_guard lock(mutex_);
      done_ = true;
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  void add(net::IncomingCall call) {
    const std::lock_guard lock(mutex_);
    calls_.push_back(std::move(call));
    wake_.notify_one();
  }

 private:
  void work(std::uint64_t thread_seed) {
    std::mt19937_64 random(thread_seed);
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return done_ || !calls_.empty(); });
      if (calls_.empty()) return;
      std::swap(calls_[random() % calls_.size()], calls_.back());
      net::IncomingCall call = std::move(calls_.back());
      calls_.pop_back();
      lock.unlock();
      echo(std::move(call));
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<net::IncomingCall> calls_;
  bool done_ = false;
  std::vector<std::thread> threads_;
};

/// Counts the ends of calls; each must come once.
struct Tally {
  explicit Tally(std::size_t calls) : ends(calls) {}

  net::CallSpec call(std::size_t index, std::size_t bytes) {
    return {[index, bytes](net::schema::Call::Builder call, net::Attachments&) {
              fill_forward(call, "ffn.0.0", index, std::to_string(index) + std::string(bytes, '.'));
            },
            soon(),
            [this, index](const Result<net::IncomingReply>& reply) {
              if (reply.has_value() && bytes_of(*reply).starts_with(std::to_string(index) + ".")) ++right;
              if (reply.has_error()) ++failed;
              ++ends[index];
              ++total;
            }};
  }

  bool each_ended_once() const {
    return std::all_of(ends.begin(), ends.end(), [](const std::atomic<int>& count) { return count == 1; });
  }

  std::vector<std::atomic<int>> ends;
  std::atomic<std::size_t> total{0};
  std::atomic<std::size_t> right{0};
  std::atomic<std::size_t> failed{0};
};

}  // namespace

TEST_CASE("a13 a thousand pipelined calls are answered out of order each exactly once", "[stress][a13]") {
  constexpr std::size_t kCalls = 1'000;
  Tally tally(kCalls);
  Workers workers(3);
  TestServer server([&](net::IncomingCall call) { workers.add(std::move(call)); }, {}, 2);
  TestClient client({}, 2);
  std::mt19937_64 random(seed());
  for (std::size_t i = 0; i < kCalls; ++i) {
    std::vector<net::CallSpec> calls;
    calls.push_back(tally.call(i, 1 + random() % 3 * random() % 20'000));
    client.client().start(server.endpoint(), std::move(calls));
  }
  wait_until([&] { return tally.total == kCalls; });
  CHECK(tally.right == kCalls);
  CHECK(tally.each_ended_once());
}

TEST_CASE("a13 pings between pipelined calls are answered and lose no reply", "[stress][a13]") {
  constexpr std::uint64_t kCalls = 300;
  Workers workers(3);
  TestServer server([&](net::IncomingCall call) { workers.add(std::move(call)); }, {}, 2);
  RawWebSocket peer(server.endpoint().port);
  for (std::uint64_t id = 1; id <= kCalls; ++id) {
    capnp::MallocMessageBuilder message;
    auto call = message.initRoot<net::schema::Frame>().initCalls(1)[0];
    call.setId(id);
    fill_forward(call, "ffn.0.0", id, std::string(200, 'x'));
    peer.send(flat(message));
    peer.ping();
  }
  std::vector<int> answers(kCalls + 1);
  for (std::uint64_t total = 0; total < kCalls;) {
    const auto bytes = peer.read();
    REQUIRE_FALSE(bytes.empty());
    capnp::FlatArrayMessageReader reader(
        kj::ArrayPtr<const capnp::word>(reinterpret_cast<const capnp::word*>(bytes.data()), bytes.size() / 8));
    for (const auto reply : reader.getRoot<net::schema::Frame>().getReplies()) {
      ++answers.at(reply.getId());
      ++total;
    }
  }
  CHECK(std::count(answers.begin() + 1, answers.end(), 1) == static_cast<std::ptrdiff_t>(kCalls));
  CHECK(peer.pongs() > 0);
}

TEST_CASE("a13 a close in the middle of a thousand calls ends each exactly once", "[stress][a13]") {
  constexpr std::size_t kCalls = 1'000;
  Tally tally(kCalls);
  Workers workers(2);
  net::RpcClientOptions options;
  options.first_backoff = 1ms;
  options.max_backoff = 1ms;
  TestClient client(options, 2);
  std::optional<TestServer> server(
      std::in_place, [&](net::IncomingCall call) { workers.add(std::move(call)); }, net::RpcServerOptions{}, 2);
  const auto endpoint = server->endpoint();
  std::thread caller([&] {
    std::mt19937_64 random(seed());
    for (std::size_t i = 0; i < kCalls; ++i) {
      std::vector<net::CallSpec> calls;
      calls.push_back(tally.call(i, 1 + random() % 50'000));
      const auto id = client.client().start(endpoint, std::move(calls)).front();
      if (random() % 10 == 0) client.client().cancel(id);
    }
  });
  wait_until([&] { return tally.right > 20; });
  server.reset();
  caller.join();
  wait_until([&] { return tally.total == kCalls; });
  CHECK(tally.each_ended_once());
  CHECK(tally.failed > 0);
}

TEST_CASE("callers on many threads share one client", "[stress]") {
  constexpr std::size_t kThreads = 4;
  constexpr std::size_t kEach = 200;
  Tally tally(kThreads * kEach);
  TestServer server(echo, {}, 2);
  TestClient client({}, 2);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (std::size_t i = 0; i < kEach; ++i) {
        std::vector<net::CallSpec> calls;
        calls.push_back(tally.call(t * kEach + i, 100));
        client.client().start(server.endpoint(), std::move(calls));
      }
    });
  }
  for (auto& thread : threads) thread.join();
  wait_until([&] { return tally.total == kThreads * kEach; });
  CHECK(tally.right == kThreads * kEach);
}

TEST_CASE("a peer that asks and never reads does not make the server hoard its answers", "[stress]") {
  std::atomic<std::size_t> calls{0};
  net::RpcServerOptions options;
  options.max_frame_bytes = 1UL << 20U;
  TestServer server(
      [&](net::IncomingCall call) {
        ++calls;
        echo(std::move(call));
      },
      options);
  capnp::MallocMessageBuilder message;
  fill_forward(message.initRoot<net::schema::Frame>().initCalls(1)[0], "ffn.0.0", 0, std::string(100'000, 'x'));
  const auto frame = flat(message);
  RawWebSocket greedy(server.endpoint().port);
  // Its own socket buffers, the kernel's, and the server's queue limit hold some; then its writes must stall.
  std::atomic<std::size_t> sent{0};
  std::atomic<bool> all_sent{false};
  std::thread sender([&] {
    for (int i = 0; i < 2'000; ++i) {
      greedy.send(frame);
      ++sent;
    }
    all_sent = true;
  });
  TestClient client;
  std::size_t last = 0;
  auto quiet_since = Clock::now();
  wait_until([&] {
    if (all_sent) return true;
    if (sent != last) {
      last = sent;
      quiet_since = Clock::now();
    }
    return Clock::now() - quiet_since > 500ms;
  });
  CHECK_FALSE(all_sent);
  auto future = client.forward(server.endpoint(), "ffn.0.0", 0, "x");
  CHECK(get(future).has_value());
  server.stop();
  sender.join();
}

TEST_CASE("uploads and replies larger than every queue do not wait for each other", "[stress]") {
  constexpr std::size_t kCalls = 60;
  Tally tally(kCalls);
  net::RpcServerOptions server_options;
  server_options.max_frame_bytes = 1UL << 20U;
  TestServer server(echo, server_options);
  net::RpcClientOptions options;
  options.max_frame_bytes = 1UL << 20U;
  TestClient client(options);
  for (std::size_t i = 0; i < kCalls; ++i) {
    std::vector<net::CallSpec> calls;
    calls.push_back(tally.call(i, 900'000));
    client.client().start(server.endpoint(), std::move(calls));
  }
  wait_until([&] { return tally.total == kCalls; });
  CHECK(tally.right == kCalls);
}
