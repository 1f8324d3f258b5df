// Memory of frames on their way in: asked for before it is committed, waited for, refused, and given back.
#include "net/metrics.hpp"
#include "tests/net/raw_peer.hpp"
#include "tests/net/rpc_fixture.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/text.hpp"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>

using namespace dmoe;
using namespace dmoe::test;

namespace {

constexpr std::size_t kMib = 1UL << 20U;

/// A number of bytes, and the most that was ever held.
class Budget : public net::FrameBudget, public std::enable_shared_from_this<Budget> {
 public:
  explicit Budget(std::size_t limit) : limit_(limit) {}

  Result<Lease> take(std::size_t bytes) override {
    const std::lock_guard lock(mutex_);
    if (bytes > kNever) return Error{Errc::kInvalidArgument, "more than there ever is", {}};
    if (bytes > limit_ - std::min(limit_, used_)) {
      ++refused_;
      return Error{Errc::kOverloaded, "the budget is empty", 50ms};
    }
    used_ += bytes;
    peak_ = std::max(peak_, used_);
    return Lease(this, [self = shared_from_this(), bytes](const void*) { self->give_back(bytes); });
  }
  void when_freed(std::function<void()> retry) override {
    const std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(retry));
  }

  void set_limit(std::size_t limit) {
    {
      const std::lock_guard lock(mutex_);
      limit_ = limit;
    }
    give_back(0);
  }
  std::size_t used() const {
    return locked([this] { return used_; });
  }
  std::size_t peak() const {
    return locked([this] { return peak_; });
  }
  std::size_t refused() const {
    return locked([this] { return refused_; });
  }

  static constexpr std::size_t kNever = 16 * kMib;

 private:
  void give_back(std::size_t bytes) {
    std::vector<std::function<void()>> waiting;
    {
      const std::lock_guard lock(mutex_);
      used_ -= bytes;
      waiting.swap(waiting_);
    }
    for (const auto& retry : waiting) retry();
  }
  template <class Read>
  std::size_t locked(Read read) const {
    const std::lock_guard lock(mutex_);
    return read();
  }

  mutable std::mutex mutex_;
  std::size_t limit_;
  std::size_t used_ = 0;
  std::size_t peak_ = 0;
  std::size_t refused_ = 0;
  std::vector<std::function<void()>> waiting_;
};

net::RpcServerOptions with(std::shared_ptr<Budget> budget, std::chrono::milliseconds patience,
                           net::Metrics* metrics = nullptr) {
  net::RpcServerOptions options;
  options.frame_budget = std::move(budget);
  options.frame_patience = patience;
  options.metrics = metrics;
  return options;
}

/// The header of a client's binary frame of `size` bytes with a masking key of zero.
std::string announce(std::uint64_t size) {
  std::string header = {static_cast<char>(0x82), static_cast<char>(0xFF)};
  for (int shift = 56; shift >= 0; shift -= 8) header.push_back(static_cast<char>(size >> shift));
  return header + std::string(4, '\0');
}

}  // namespace

TEST_CASE("a10 many large frames against a small budget wait for each other and are all answered", "[budget][a10]") {
  constexpr std::size_t kClients = 6;
  constexpr std::size_t kEach = 6;
  constexpr std::size_t kLimit = 3 * kMib + kMib / 2;  // Three frames at a time, of 36.
  const auto budget = std::make_shared<Budget>(kLimit);
  std::mutex mutex;
  std::vector<net::IncomingCall> held;
  bool hold = true;  // Until a frame has found the budget empty: as many as fit are there together.
  TestServer server(
      [&](net::IncomingCall call) {
        {
          const std::lock_guard lock(mutex);
          if (hold) {
            held.push_back(std::move(call));
            return;
          }
        }
        echo(std::move(call));
      },
      with(budget, kPatience), 2);
  std::vector<std::unique_ptr<TestClient>> clients;
  for (std::size_t i = 0; i < kClients; ++i) clients.push_back(std::make_unique<TestClient>());
  std::vector<TestClient::Future> replies;
  for (std::size_t i = 0; i < kClients * kEach; ++i) {
    const std::string bytes(kMib, static_cast<char>('a' + i % 26));
    replies.push_back(clients[i % kClients]->forward(server.endpoint(), "ffn.0.0", i, bytes));
  }
  wait_until([&] {
    const std::lock_guard lock(mutex);
    return held.size() == 3 && budget->refused() > 0;
  });
  std::vector<net::IncomingCall> waiting;
  {
    const std::lock_guard lock(mutex);
    hold = false;
    waiting.swap(held);
  }
  for (auto& call : waiting) echo(std::move(call));
  waiting.clear();
  for (std::size_t i = 0; i < replies.size(); ++i) {
    const auto reply = get(replies[i]);
    INFO((reply.has_error() ? describe(reply.error()) : ""));
    REQUIRE(reply.has_value());
    CHECK(bytes_of(*reply) == std::string(kMib, static_cast<char>('a' + i % 26)));
  }
  CHECK(budget->peak() >= 3 * kMib);
  CHECK(budget->peak() <= kLimit);
  wait_until([&] { return budget->used() == 0; });
}

TEST_CASE("a10 four times as many calls as workers that each need memory all end and no more than memory allows",
          "[budget][a10]") {
  // The second resource of a call is the memory of its frame; workers that hold it wait for each other's.
  constexpr std::size_t kWorkers = 3;
  constexpr std::size_t kCalls = 4 * kWorkers;
  const auto budget = std::make_shared<Budget>(2 * kMib + kMib / 2);  // Fewer calls than workers.
  std::mutex mutex;
  std::condition_variable wake;
  std::vector<net::IncomingCall> calls;
  bool over = false;
  std::vector<std::thread> workers;
  TestServer server(
      [&](net::IncomingCall call) {
        const std::lock_guard lock(mutex);
        calls.push_back(std::move(call));
        wake.notify_one();
      },
      with(budget, kPatience));
  for (std::size_t i = 0; i < kWorkers; ++i) {
    workers.emplace_back([&] {
      std::unique_lock lock(mutex);
      for (;;) {
        wake.wait(lock, [&] { return over || !calls.empty(); });
        if (calls.empty()) return;
        auto call = std::move(calls.back());
        calls.pop_back();
        lock.unlock();
        echo(std::move(call));
        lock.lock();
      }
    });
  }
  {
    std::vector<std::unique_ptr<TestClient>> clients;
    std::vector<TestClient::Future> replies;
    for (std::size_t i = 0; i < kCalls; ++i) {
      clients.push_back(std::make_unique<TestClient>());
      // Every third caller is impatient: its time counts from the start of the call, waiting for memory included.
      const auto deadline = i % 3 == 0 ? Clock::now() + 30ms : soon();
      replies.push_back(clients.back()->forward(server.endpoint(), "ffn.0.0", i, std::string(kMib, 'x'), deadline));
    }
    for (std::size_t i = 0; i < kCalls; ++i) {
      const auto reply = get(replies[i]);
      INFO(i << (reply.has_error() ? describe(reply.error()) : ""));
      if (i % 3 == 0 && reply.has_error()) {
        CHECK(reply.error().code == Errc::kDeadlineExceeded);
      } else {
        REQUIRE(reply.has_value());
        CHECK(bytes_of(*reply).size() == kMib);
      }
    }
  }
  CHECK(budget->peak() <= 2 * kMib + kMib / 2);
  {
    const std::lock_guard lock(mutex);
    over = true;
  }
  wake.notify_all();
  for (auto& worker : workers) worker.join();
  wait_until([&] { return budget->used() == 0; });
}

TEST_CASE("calls of a frame that finds no room are answered overloaded and the connection goes on", "[budget][a10]") {
  net::Metrics metrics;
  const auto budget = std::make_shared<Budget>(0);
  TestServer server(echo, with(budget, 10ms, &metrics));
  TestClient client;
  const std::string large(2 * kMib, 'x');
  for (int i = 0; i < 3; ++i) {
    auto refused = client.forward(server.endpoint(), "ffn.0.0", 0, large);
    const auto reply = get(refused);
    REQUIRE(reply.has_error());
    CHECK(reply.error().code == Errc::kOverloaded);
    CHECK(reply.error().retry_after == 50ms);
    CHECK(contains(reply.error().message, "the budget is empty"));
  }
  auto small = client.forward(server.endpoint(), "ffn.0.0", 0, "x");
  CHECK(get(small).has_value());  // It needs no memory of the budget.
  budget->set_limit(4 * kMib);
  auto fits = client.forward(server.endpoint(), "ffn.0.0", 0, large);
  const auto reply = get(fits);
  REQUIRE(reply.has_value());
  CHECK(bytes_of(*reply) == large);
  CHECK(metrics.counter("dmoe_rpc_connections_accepted_total", "").Value() == 2);  // Control and bulk, never anew.
}

TEST_CASE("each of many calls in a refused frame is answered", "[budget]") {
  const auto budget = std::make_shared<Budget>(0);
  TestServer server(echo, with(budget, 1ms));
  TestClient client;
  constexpr std::size_t kCalls = 100;  // Their list does not fit the first segment of a message.
  std::atomic<std::size_t> overloaded{0};
  std::atomic<std::size_t> ended{0};
  std::vector<net::CallSpec> calls;
  for (std::size_t i = 0; i < kCalls; ++i) {
    calls.push_back({[i](net::schema::Call::Builder call, net::Attachments&) {
                       fill_forward(call, "ffn.0.0", i, std::string(10'000, 'x'));
                     },
                     soon(),
                     [&](const Result<net::IncomingReply>& reply) {
                       if (reply.has_error() && reply.error().code == Errc::kOverloaded) ++overloaded;
                       ++ended;
                     }});
  }
  client.client().start(server.endpoint(), std::move(calls));
  wait_until([&] { return ended == kCalls; });
  CHECK(overloaded == kCalls);
}

TEST_CASE("a frame that the budget can never hold is refused at once with the budget's words", "[budget]") {
  const auto budget = std::make_shared<Budget>(64 * kMib);
  TestServer server(echo, with(budget, kPatience));
  TestClient client;
  auto future = client.forward(server.endpoint(), "ffn.0.0", 0, std::string(Budget::kNever + 1, 'x'));
  const auto reply = get(future);
  REQUIRE(reply.has_error());
  CHECK(reply.error().code == Errc::kInvalidArgument);
  CHECK(contains(reply.error().message, "more than there ever is"));
  auto fits = client.forward(server.endpoint(), "ffn.0.0", 0, std::string(2 * kMib, 'x'));
  CHECK(get(fits).has_value());
}

TEST_CASE("a4 a sender that trickles into memory it was given loses its connection and the memory is free again",
          "[budget][a4]") {
  net::Metrics metrics;
  const auto budget = std::make_shared<Budget>(8 * kMib);
  auto options = with(budget, kPatience, &metrics);
  options.arrival_timeout = 40ms;
  TestServer server(echo, options);
  RawWebSocket slow(server.endpoint().port);
  REQUIRE(slow.status() == 101);
  slow.send_raw(announce(4 * kMib) + std::string(20'000, '\0'));
  wait_until([&] { return budget->used() == 4 * kMib; });
  std::atomic<bool> stop{false};
  std::thread trickle([&] {
    while (!stop) {
      slow.send_raw("x");
      std::this_thread::yield();
    }
  });
  wait_until([&] { return budget->used() == 0; });
  stop = true;
  trickle.join();
  wait_until([&] { return metrics.gauge("dmoe_rpc_connections", "").Value() == 0; });
}

TEST_CASE("a4 a caller that vanishes in the middle of a frame gives its memory back", "[budget][a4]") {
  const auto budget = std::make_shared<Budget>(8 * kMib);
  TestServer server(echo, with(budget, kPatience));
  {
    RawWebSocket vanishing(server.endpoint().port);
    vanishing.send_raw(announce(4 * kMib) + std::string(20'000, '\0'));
    wait_until([&] { return budget->used() == 4 * kMib; });
  }
  wait_until([&] { return budget->used() == 0; });
}

TEST_CASE("a refused frame that does not tell whose it is costs the connection and says when to come back",
          "[budget][a6]") {
  const auto budget = std::make_shared<Budget>(0);
  TestServer server(echo, with(budget, 1ms));
  RawWebSocket peer(server.endpoint().port);
  peer.send(std::string(kMib, '\xFF'));
  CHECK(peer.close_code() == 1013);
  CHECK(contains(peer.close_reason(), "memory"));
}

TEST_CASE("a6 a frame beyond the cap never reaches the budget", "[budget][a6]") {
  const auto budget = std::make_shared<Budget>(64 * kMib);
  auto options = with(budget, kPatience);
  options.max_frame_bytes = kMib;
  TestServer server(echo, options);
  RawWebSocket peer(server.endpoint().port);
  peer.send_raw(announce(2 * kMib));
  CHECK(peer.close_code() == 1009);
  CHECK(budget->peak() == 0);
}
