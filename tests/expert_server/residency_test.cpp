// More experts than fit memory, and calls that hold more memory than there is.
#include "expert_server/arriving_calls.hpp"
#include "expert_server/expert_host.hpp"
#include "expert_server/memory_budget.hpp"
#include "expert_server/server.hpp"
#include "tests/expert_server/fixtures.hpp"
#include "tests/expert_server/http_get.hpp"
#include "tests/expert_server/test_caller.hpp"
#include "tests/support/catch.hpp"

#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <thread>

using namespace dmoe;
using namespace dmoe::expert_server;
using namespace dmoe::expert_server::test;
using namespace std::chrono_literals;

namespace {

/// An SGD expert of width 8 whose updates can be counted by what it answers.
ExpertHostOptions host_options(const std::filesystem::path& folder, std::size_t max_resident) {
  ExpertHostOptions options;
  options.expert.hidden_dim = 8;
  options.checkpoints = folder;
  options.keep_checkpoints = 1;
  options.max_resident = max_resident;
  options.compute_threads = 2;
  options.seed = 5;
  return options;
}

std::string name_of(std::size_t i) { return "ffn." + std::to_string(i); }

std::size_t resident_experts(ExpertHost& host) {
  std::size_t count = 0;
  for (const auto& expert : host.table().all()) count += host.runtimes().of(*expert).is_resident(*expert) ? 1 : 0;
  return count;
}

Outcome call(ExpertHost& host, std::size_t i, const at::Tensor& x, bool backward) {
  Answers answers(1);
  auto task = backward ? answers.task(0, {x}, {torch::ones_like(x)}) : answers.task(0, {x});
  const auto queued =
      host.runtimes()
          .of(*host.table().find(name_of(i)))
          .submit(host.table().find(name_of(i)), backward ? Direction::kBackward : Direction::kForward, task);
  if (!queued) return queued.error();
  if (!answers.wait_all()) return Error{Errc::kDeadlineExceeded, "no answer", {}};
  return answers[0];
}

}  // namespace

TEST_CASE("experts that do not fit memory lie on disk and come back when they are called", "[residency]") {
  const TemporaryFolder few;
  const TemporaryFolder all;
  net::Metrics registry;
  ServerMetrics metrics(registry);
  constexpr std::size_t kExperts = 5;
  ExpertHost host(host_options(few.path(), 2), metrics);
  ExpertHost reference(host_options(all.path(), 0), metrics);
  for (std::size_t i = 0; i < kExperts; ++i) {
    REQUIRE(host.load(uid(name_of(i))).has_value());
    REQUIRE(reference.load(uid(name_of(i))).has_value());
  }
  CHECK(resident_experts(host) <= 2);
  const auto x = torch::randn({3, 8});
  for (int round = 0; round < 3; ++round) {
    for (std::size_t i = 0; i < kExperts; ++i) {
      for (const bool backward : {false, true}) {
        const auto mine = call(host, i, x, backward);
        const auto theirs = call(reference, i, x, backward);
        INFO((mine ? std::string() : mine.error().message));
        REQUIRE(mine.has_value());
        CHECK(same_bits(mine.value()[0], theirs.value()[0]));
      }
      CHECK(resident_experts(host) <= 2);
      CHECK(host.table().find(name_of(i))->backend->updates() == std::uint64_t(round) + 1);
    }
  }
}

TEST_CASE("many callers of more experts than fit memory are all answered", "[residency]") {
  for (const std::size_t max_resident : {1U, 2U}) {
    const TemporaryFolder folder;
    net::Metrics registry;
    ServerMetrics metrics(registry);
    constexpr std::size_t kExperts = 4;
    constexpr int kCalls = 15;
    ExpertHost host(host_options(folder.path(), max_resident), metrics);
    for (std::size_t i = 0; i < kExperts; ++i) REQUIRE(host.load(uid(name_of(i))).has_value());
    std::atomic<int> failed{0};
    std::vector<std::thread> callers;
    for (std::size_t c = 0; c < 2 * kExperts; ++c) {
      callers.emplace_back([&, c] {
        for (int i = 0; i < kCalls; ++i) {
          if (!call(host, c % kExperts, torch::ones({1, 8}), true)) ++failed;
        }
      });
    }
    for (auto& caller : callers) caller.join();
    CHECK(failed == 0);
    std::uint64_t updates = 0;
    for (const auto& expert : host.table().all()) updates += expert->backend->updates();
    CHECK(updates > 0);
    CHECK(updates <= 2 * kExperts * kCalls);
  }
}

TEST_CASE("an expert whose file is gone fails its callers and no others", "[residency]") {
  const TemporaryFolder folder;
  net::Metrics registry;
  ServerMetrics metrics(registry);
  ExpertHost host(host_options(folder.path(), 1), metrics);
  REQUIRE(host.load(uid("ffn.0")).has_value());
  REQUIRE(host.load(uid("ffn.1")).has_value());
  std::filesystem::remove_all(folder.path() / "ffn.0");
  const auto lost = call(host, 0, torch::ones({1, 8}), false);
  REQUIRE(lost.has_error());
  CHECK(lost.error().code == Errc::kUnavailable);
  CHECK(call(host, 1, torch::ones({1, 8}), false).has_value());
}

TEST_CASE("what waits for an expert on disk is answered when the server stops", "[residency]") {
  const TemporaryFolder folder;
  net::Metrics registry;
  ServerMetrics metrics(registry);
  ExpertHost host(host_options(folder.path(), 1), metrics);
  for (std::size_t i = 0; i < 3; ++i) REQUIRE(host.load(uid(name_of(i))).has_value());
  Answers answers(12);
  for (std::size_t i = 0; i < 12; ++i) {
    auto task = answers.task(i, {torch::ones({1, 8})});
    REQUIRE(host.runtimes()
                .of(*host.table().find(name_of(i % 3)))
                .submit(host.table().find(name_of(i % 3)), Direction::kForward, task)
                .has_value());
  }
  host.stop(0ms);
  CHECK(answers.wait_all());
}

TEST_CASE("a budget gives out what it has and takes it back", "[memory]") {
  const auto budget = std::make_shared<MemoryBudget>(100);
  auto first = budget->take(60);
  CHECK(first);
  CHECK_FALSE(budget->take(50));
  CHECK_FALSE(budget->take(30, 20));
  {
    const auto second = budget->take(40);
    CHECK(second);
    CHECK(budget->used() == 100);
  }
  CHECK(budget->used() == 60);
  auto moved = std::move(first);
  CHECK(budget->used() == 60);
  moved = MemoryBudget::Lease();
  first = MemoryBudget::Lease();
  CHECK(budget->used() == 0);
  CHECK_FALSE(budget->take(MemoryBudget::kUnlimited));
}

TEST_CASE("calls are refused with a time to come back before memory runs out", "[memory][server]") {
  ServerOptions options;
  options.listen = {"127.0.0.1", 0};
  options.expert_pattern = "ffn.[0:1]";
  options.expert.hidden_dim = 1'024;
  options.expert.max_batch_size = 256;
  options.compute_threads = 1;
  options.seed = 7;
  options.max_connections = 16;
  options.max_memory = 9UL * 1024 * 1024;  // A quarter of it is for what arrives: two calls of 1 MiB.
  options.memory_patience = 1ms;           // Refused rather than waited for.
  auto server = Server::start(options);
  REQUIRE(server.has_value());
  const net::Endpoint endpoint{"127.0.0.1", (*server)->port()};
  std::atomic<int> answered{0};
  std::atomic<int> refused{0};
  std::atomic<int> other{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 8; ++c) {
    callers.emplace_back([&] {
      TestCaller caller(endpoint);
      for (int i = 0; i < 4; ++i) {
        const auto outcome = caller.forward("ffn.0", {torch::zeros({256, 1'024})});
        if (outcome) {
          ++answered;
        } else if (outcome.error().code == Errc::kOverloaded && outcome.error().retry_after.value_or(0ms) > 0ms) {
          ++refused;
        } else {
          ++other;
        }
      }
    });
  }
  for (auto& caller : callers) caller.join();
  CHECK(answered > 0);
  CHECK(refused > 0);  // Eight callers, room for two.
  CHECK(other == 0);
  TestCaller caller(endpoint);
  CHECK(caller.forward("ffn.0", {torch::zeros({256, 1'024})}).has_value());  // All was given back.
  options.max_memory = 1'000'000;
  CHECK(Server::start(options).error().code == Errc::kInvalidArgument);
  options.max_memory = 0;
  options.max_resident_experts = 2;
  CHECK(Server::start(options).error().message.find("data_dir") != std::string::npos);
}

TEST_CASE("a10 calls that together exceed the memory wait their turn and are all answered", "[memory][server][a10]") {
  ServerOptions options;
  options.listen = {"127.0.0.1", 0};
  options.expert_pattern = "nop.[0:1]";
  options.expert.architecture = "nop";
  options.expert.hidden_dim = 1'024;
  options.expert.max_batch_size = 256;
  options.compute_threads = 1;
  options.io_threads = 2;
  options.max_connections = 16;
  options.max_memory = 9UL * 1024 * 1024;
  options.memory_patience = 60s;
  auto server = Server::start(options);
  REQUIRE(server.has_value());
  const net::Endpoint endpoint{"127.0.0.1", (*server)->port()};
  constexpr int kCallers = 12;  // Of 1 MiB a call; two fit.
  std::atomic<int> answered{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < kCallers; ++c) {
    callers.emplace_back([&, c] {
      TestCaller caller(endpoint);
      const auto input = torch::full({256, 1'024}, double(c));
      for (int i = 0; i < 4; ++i) {
        const auto outcome = caller.forward("nop.0", {input});
        if (outcome && torch::equal((*outcome)[0], input)) ++answered;
      }
    });
  }
  for (auto& caller : callers) caller.join();
  CHECK(answered == 4 * kCallers);
}

TEST_CASE("memory that is given back is offered to those who wait for it", "[memory]") {
  const auto budget = std::make_shared<MemoryBudget>(100);
  ArrivingCalls arriving(budget);
  CHECK(arriving.take(26).error().code == Errc::kInvalidArgument);  // A quarter, whoever else is there.
  auto frame = arriving.take(20);
  REQUIRE(frame.has_value());
  CHECK(budget->used() == 20);
  CHECK(arriving.take(10).error().code == Errc::kOverloaded);
  int called = 0;
  arriving.when_freed([&] { ++called; });
  CHECK(called == 0);
  frame = Error{};
  CHECK(called == 1);
  CHECK(budget->used() == 0);
  CHECK(arriving.take(10).has_value());
  CHECK(called == 1);  // Once.
  {
    const auto answers = budget->take(90);
    CHECK(arriving.take(20).error().code == Errc::kOverloaded);
  }
  CHECK(arriving.take(20).has_value());
}

TEST_CASE("a server with more experts than it may hold announces and answers all of them", "[residency][server]") {
  const TemporaryFolder folder;
  ServerOptions options;
  options.listen = {"127.0.0.1", 0};
  options.expert_pattern = "ffn.[0:6]";
  options.expert.hidden_dim = 8;
  options.compute_threads = 1;
  options.seed = 7;
  options.data_dir = folder.path();
  options.max_resident_experts = 2;
  auto server = Server::start(options);
  REQUIRE(server.has_value());
  CHECK((*server)->experts().size() == 6);
  TestCaller caller({"127.0.0.1", (*server)->port()});
  const auto x = torch::randn({2, 8});
  std::vector<at::Tensor> answers;
  for (std::size_t i = 0; i < 6; ++i) answers.push_back(caller.forward(name_of(i), {x}).value()[0]);
  CHECK((*server)->checkpoint().has_value());
  (*server)->stop();
  server->reset();
  options.max_resident_experts = 0;
  auto again = Server::start(options);
  REQUIRE(again.has_value());
  TestCaller second({"127.0.0.1", (*again)->port()});
  for (std::size_t i = 0; i < 6; ++i) CHECK(same_bits(second.forward(name_of(i), {x}).value()[0], answers[i]));
}

namespace {

std::uint64_t resident_kib() {
  std::ifstream statm("/proc/self/statm");
  std::uint64_t pages = 0;
  std::uint64_t resident = 0;
  statm >> pages >> resident;
  return resident * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)) / 1'024;
}

/// Two experts take turns in the only place there is, each learning a step while one session stays open: every turn
/// writes and unloads one and loads the other.
void take_turns(int cycles) {
  const TemporaryFolder folder;
  ServerOptions options;
  options.listen = {"127.0.0.1", 0};
  options.expert_pattern = "ffn.[0:2]";
  options.expert.hidden_dim = 256;  // 6.3 MB of weights, and twice as much that Adam keeps.
  options.compute_threads = 1;
  options.seed = 7;
  options.data_dir = folder.path();
  options.max_resident_experts = 1;
  options.keep_checkpoints = 1;
  const auto server = Server::start(options).value();
  TestCaller caller({"127.0.0.1", server->port()});
  const auto x = torch::randn({4, 256});
  const auto cycle = [&] {
    for (std::size_t i = 0; i < 2; ++i) REQUIRE(caller.backward(name_of(i), {x}, {x}).has_value());
  };
  cycle();
  const auto first = resident_kib();
  for (int i = 1; i < cycles; ++i) cycle();
  INFO("KiB after the first cycle " << first << ", at the end " << resident_kib());
#ifndef __SANITIZE_ADDRESS__  // It keeps freed memory for a while.
  CHECK(resident_kib() <= first + first / 20);
#endif
  for (std::size_t i = 0; i < 2; ++i) {
    CHECK(caller.info(name_of(i))->updates == static_cast<std::uint64_t>(cycles));
  }
}

}  // namespace

TEST_CASE("a8 experts that are unloaded give their memory back while sessions stay open", "[residency][server][a8]") {
  take_turns(20);
}

TEST_CASE("a8 experts that are unloaded 200 times give their memory back while sessions stay open", "[.long][a8]") {
  take_turns(200);
}
