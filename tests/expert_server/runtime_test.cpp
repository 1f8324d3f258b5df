#include "expert_server/runtime.hpp"

#include "tests/expert_server/fixtures.hpp"
#include "tests/support/catch.hpp"

#include <atomic>
#include <future>

using namespace dmoe;
using namespace dmoe::expert_server;
using namespace dmoe::expert_server::test;
using namespace std::chrono_literals;

namespace {

std::shared_ptr<HostedExpert> hosted(std::unique_ptr<ExpertBackend> backend, const TaskPoolOptions& options = {}) {
  return std::make_shared<HostedExpert>(std::move(backend), options);
}

/// A job that keeps the device busy until released.
class Roadblock {
 public:
  explicit Roadblock(Runtime& runtime) {
    auto reached = std::make_shared<std::promise<void>>();
    runtime.post([reached, gate = released_.get_future().share()] {
      reached->set_value();
      gate.wait();
    });
    reached->get_future().wait();
  }
  void release() { released_.set_value(); }

 private:
  std::promise<void> released_;
};

std::shared_ptr<HostedExpert> plus_one(const std::string& name, const TaskPoolOptions& options = {}) {
  return hosted(backend_of(std::make_unique<FunctionExpert>(3, [](const at::Tensor& x) { return x + 1; }), name),
                options);
}

}  // namespace

TEST_CASE("tasks that wait together are one batch", "[runtime]") {
  std::vector<std::int64_t> rows;
  Runtime runtime({.compute_threads = 1,
                   .grouped = true,
                   .on_batch = [&](const BatchReport& report) { rows.push_back(report.rows); },
                   .on_dropped = {}});
  const auto expert = plus_one("test.0");
  Answers answers(16);
  Roadblock block(runtime);
  for (std::size_t i = 0; i < 16; ++i) {
    auto task = answers.task(i, {torch::full({1, 3}, double(i))});
    REQUIRE(runtime.submit(expert, Direction::kForward, task).has_value());
  }
  CHECK(runtime.load().tasks == 16);
  block.release();
  REQUIRE(answers.wait_all());
  runtime.stop(1s);
  CHECK(rows == std::vector<std::int64_t>{16});
  for (std::size_t i = 0; i < 16; ++i) CHECK(answers[i].value()[0][0][0].item<float>() == float(i) + 1);
}

TEST_CASE("the expert whose oldest task waits longest is served first", "[runtime]") {
  Runtime runtime({.compute_threads = 1, .grouped = true, .on_batch = {}, .on_dropped = {}});
  const auto first = plus_one("test.1");
  const auto second = plus_one("test.0");
  Answers answers(3);
  Roadblock block(runtime);
  const std::vector<std::shared_ptr<HostedExpert>> targets{first, second, first};
  for (std::size_t i = 0; i < 3; ++i) {
    auto task = answers.task(i, {torch::zeros({1, 3})});
    REQUIRE(runtime.submit(targets[i], Direction::kForward, task).has_value());
  }
  block.release();
  REQUIRE(answers.wait_all());
  CHECK(answers.order() == std::vector<std::size_t>{0, 2, 1});
}

TEST_CASE("expired tasks never reach the device", "[runtime]") {
  auto computed = std::make_shared<std::atomic<int>>(0);
  Runtime runtime({.compute_threads = 1, .grouped = true, .on_batch = {}, .on_dropped = {}});
  const auto expert = hosted(backend_of(std::make_unique<FunctionExpert>(3, [computed](const at::Tensor& x) {
    ++*computed;
    return x + 1;
  })));
  Answers answers(1);
  Roadblock block(runtime);
  auto task = answers.task(0, {torch::zeros({1, 3})});
  task.deadline = std::chrono::steady_clock::now() + 1ms;
  const auto deadline = task.deadline;
  REQUIRE(runtime.submit(expert, Direction::kForward, task).has_value());
  while (std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  block.release();
  REQUIRE(answers.wait_all());
  CHECK(answers[0].error().code == Errc::kDeadlineExceeded);
  CHECK(*computed == 0);
}

TEST_CASE("g13 a call that would wait longer than its caller is refused at once", "[runtime][g13]") {
  Runtime runtime({.compute_threads = 1, .grouped = true, .on_batch = {}, .on_dropped = {}});
  const auto busy = plus_one("test.0");
  const auto other = plus_one("test.1");
  Answers answers(3);
  Roadblock block(runtime);
  const auto now = std::chrono::steady_clock::now();
  auto oldest = answers.task(0, {torch::zeros({1, 3})});
  oldest.arrived = now - 10s;  // So the server is ten seconds behind.
  REQUIRE(runtime.submit(busy, Direction::kForward, oldest).has_value());
  for (const auto& expert : {busy, other}) {
    auto hurried = answers.task(1, {torch::zeros({1, 3})});
    hurried.deadline = now + 5s;
    const auto refused = runtime.submit(expert, Direction::kForward, hurried);
    REQUIRE(refused.has_error());
    CHECK(refused.error().code == Errc::kOverloaded);
    REQUIRE(refused.error().retry_after.has_value());
    CHECK(*refused.error().retry_after > 0ms);
  }
  auto patient = answers.task(1, {torch::zeros({1, 3})});
  patient.deadline = now + 60s;
  CHECK(runtime.submit(other, Direction::kForward, patient).has_value());
  auto endless = answers.task(2, {torch::zeros({1, 3})});
  CHECK(runtime.submit(busy, Direction::kForward, endless).has_value());
  block.release();
  REQUIRE(answers.wait_all());
}

TEST_CASE("g13 calls that wait for company do not make a server look full", "[runtime][g13]") {
  TaskPoolOptions options;
  options.batch_timeout = 60s;
  options.max_batch_rows = 2;
  Runtime runtime({.compute_threads = 1, .grouped = true, .on_batch = {}, .on_dropped = {}});
  const auto expert = plus_one("test.0", options);
  Answers answers(2);
  auto first = answers.task(0, {torch::zeros({1, 3})});
  first.arrived = std::chrono::steady_clock::now() - 10s;
  REQUIRE(runtime.submit(expert, Direction::kForward, first).has_value());
  auto second = answers.task(1, {torch::zeros({1, 3})});
  second.deadline = std::chrono::steady_clock::now() + 30s;
  CHECK(runtime.submit(expert, Direction::kForward, second).has_value());
  CHECK(answers.wait_all());
}

TEST_CASE("cancelled tasks never reach the device and their neighbours do", "[runtime]") {
  auto rows = std::make_shared<std::atomic<std::int64_t>>(0);
  Runtime runtime({.compute_threads = 1, .grouped = true, .on_batch = {}, .on_dropped = {}});
  const auto expert = hosted(backend_of(std::make_unique<FunctionExpert>(3, [rows](const at::Tensor& x) {
    *rows += x.size(0);
    return x + 1;
  })));
  Answers gone(2);
  Answers kept(1);
  Roadblock block(runtime);
  for (std::size_t i = 0; i < 2; ++i) {
    auto task = gone.task(i, {torch::zeros({5, 3})});
    REQUIRE(runtime.submit(expert, Direction::kForward, task).has_value());
  }
  auto task = kept.task(0, {torch::zeros({2, 3})});
  REQUIRE(runtime.submit(expert, Direction::kForward, task).has_value());
  gone.cancel();
  block.release();
  REQUIRE(gone.wait_all());
  REQUIRE(kept.wait_all());
  CHECK(gone[0].error().code == Errc::kCancelled);
  CHECK(gone[1].error().code == Errc::kCancelled);
  CHECK(kept[0].has_value());
  CHECK(*rows == 2);
}

TEST_CASE("a1 one throwing call leaves the device and other experts at work", "[runtime]") {
  Runtime runtime({.compute_threads = 1, .grouped = true, .on_batch = {}, .on_dropped = {}});
  const auto moody = hosted(backend_of(std::make_unique<FunctionExpert>(3, [](const at::Tensor& x) {
    if (x[0][0].item<float>() == 13) throw std::runtime_error("I fear 13");
    return x + 1;
  })));
  const auto other = plus_one("test.1");
  Answers answers(3);
  auto bad = answers.task(0, {torch::full({1, 3}, 13.0)});
  REQUIRE(runtime.submit(moody, Direction::kForward, bad).has_value());
  auto good = answers.task(1, {torch::full({1, 3}, 12.0)});
  REQUIRE(runtime.submit(moody, Direction::kForward, good).has_value());
  auto elsewhere = answers.task(2, {torch::full({1, 3}, 13.0)});
  REQUIRE(runtime.submit(other, Direction::kForward, elsewhere).has_value());
  REQUIRE(answers.wait_all());
  CHECK(answers[0].error().message.find("I fear 13") != std::string::npos);
  CHECK(answers[1].value()[0][0][0].item<float>() == 13);
  CHECK(answers[2].value()[0][0][0].item<float>() == 14);
}

TEST_CASE("stopping serves what is queued and refuses what comes later", "[runtime]") {
  Runtime runtime({.compute_threads = 1, .grouped = true, .on_batch = {}, .on_dropped = {}});
  const auto expert = plus_one("test.0");
  Answers answers(2);
  auto queued = answers.task(0, {torch::zeros({1, 3})});
  REQUIRE(runtime.submit(expert, Direction::kForward, queued).has_value());
  runtime.stop(10s);
  CHECK(answers[0].has_value());
  auto late = answers.task(1, {torch::zeros({1, 3})});
  CHECK(runtime.submit(expert, Direction::kForward, late).error().code == Errc::kUnavailable);
}

TEST_CASE("without grace what is queued is told to go elsewhere", "[runtime]") {
  Runtime runtime({.compute_threads = 1, .grouped = true, .on_batch = {}, .on_dropped = {}});
  const auto expert = plus_one("test.0");
  Answers answers(1);
  Roadblock block(runtime);
  auto queued = answers.task(0, {torch::zeros({1, 3})});
  REQUIRE(runtime.submit(expert, Direction::kForward, queued).has_value());
  std::thread stopper([&] { runtime.stop(0ms); });
  REQUIRE(answers.wait_all());
  CHECK(answers[0].error().code == Errc::kUnavailable);
  block.release();
  stopper.join();
}

TEST_CASE("a removed expert answers what waited and takes nothing more", "[runtime]") {
  Runtime runtime({.compute_threads = 1, .grouped = true, .on_batch = {}, .on_dropped = {}});
  const auto expert = plus_one("test.0");
  Answers answers(2);
  Roadblock block(runtime);
  auto queued = answers.task(0, {torch::zeros({1, 3})});
  REQUIRE(runtime.submit(expert, Direction::kForward, queued).has_value());
  runtime.remove(expert);
  CHECK(answers[0].error().code == Errc::kNotFound);
  auto late = answers.task(1, {torch::zeros({1, 3})});
  CHECK(runtime.submit(expert, Direction::kForward, late).error().code == Errc::kNotFound);
  block.release();
}

TEST_CASE("many threads call many experts and each gets its own answer", "[runtime]") {
  Runtime runtime({.compute_threads = 1, .grouped = true, .on_batch = {}, .on_dropped = {}});
  std::vector<std::shared_ptr<HostedExpert>> experts;
  for (int i = 0; i < 4; ++i) experts.push_back(plus_one("test." + std::to_string(i)));
  constexpr std::size_t kThreads = 4;
  constexpr std::size_t kCalls = 200;
  std::vector<std::unique_ptr<Answers>> answers;
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < kThreads; ++t) answers.push_back(std::make_unique<Answers>(kCalls));
  std::atomic<int> refused{0};
  for (std::size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (std::size_t i = 0; i < kCalls; ++i) {
        auto task = answers[t]->task(i, {torch::full({1, 3}, double(t * kCalls + i))});
        if (!runtime.submit(experts[i % experts.size()], Direction::kForward, task)) ++refused;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  REQUIRE(refused == 0);
  for (std::size_t t = 0; t < kThreads; ++t) {
    REQUIRE(answers[t]->wait_all());
    for (std::size_t i = 0; i < kCalls; ++i) {
      REQUIRE((*answers[t])[i].value()[0][0][0].item<float>() == float(t * kCalls + i) + 1);
    }
  }
}

TEST_CASE("a company window is kept and a full batch does not wait for it", "[runtime]") {
  std::vector<std::size_t> tasks;
  Runtime runtime({.compute_threads = 1,
                   .grouped = true,
                   .on_batch = [&](const BatchReport& report) { tasks.push_back(report.tasks); },
                   .on_dropped = {}});
  const auto expert = plus_one("test.0", {.max_batch_rows = 2, .batch_timeout = std::chrono::minutes{10}});
  Answers answers(2);
  for (std::size_t i = 0; i < 2; ++i) {
    auto task = answers.task(i, {torch::zeros({1, 3})});
    REQUIRE(runtime.submit(expert, Direction::kForward, task).has_value());
  }
  REQUIRE(answers.wait_all());
  runtime.stop(1s);
  CHECK(tasks == std::vector<std::size_t>{2});
}

TEST_CASE("a quick expert that callers compute themselves is never computed twice at once", "[runtime]") {
  auto inside = std::make_shared<std::atomic<int>>(0);
  auto clashes = std::make_shared<std::atomic<int>>(0);
  auto computed = std::make_shared<std::atomic<std::int64_t>>(0);
  Runtime runtime({.compute_threads = 1, .grouped = true, .on_batch = {}, .on_dropped = {}});
  const auto expert = hosted(backend_of(std::make_unique<FunctionExpert>(3, [=](const at::Tensor& x) {
    if (inside->fetch_add(1) != 0) ++*clashes;
    *computed += x.size(0);
    inside->fetch_sub(1);
    return x;
  })));
  constexpr int kCalls = 1'000;
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kCalls; ++i) {
        Answers answers(1);
        auto task = answers.task(0, {torch::full({1, 3}, double(t * kCalls + i))});
        const bool right = runtime.submit(expert, Direction::kForward, task) && answers.wait_all() &&
                           answers[0].value()[0][0][0].item<float>() == float(t * kCalls + i);
        wrong += right ? 0 : 1;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(*clashes == 0);
  CHECK(*computed == 4 * kCalls);
}
