// Small batches of several experts, computed at once.
#include "expert_server/compute_threads.hpp"
#include "expert_server/few_rows.hpp"
#include "expert_server/runtime.hpp"
#include "tests/expert_server/fixtures.hpp"
#include "tests/support/catch.hpp"

#include <torch/nn/functional/linear.h>

#include <atomic>
#include <future>
#include <limits>

using namespace dmoe;
using namespace dmoe::expert_server;
using namespace dmoe::expert_server::test;
using namespace std::chrono_literals;

namespace {

constexpr std::size_t kExperts = 6;

/// An expert that may run beside others.
class SideBySide final : public ExpertModule {
 public:
  explicit SideBySide(FunctionExpert::Function function) : inner_(3, std::move(function)) {}
  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs, at::Generator& generator) override {
    return inner_.forward(inputs, generator);
  }
  const ExpertSchema& schema() const override { return inner_.schema(); }
  std::vector<NamedTensor> parameters() const override { return {}; }
  bool runs_beside_others() const override { return true; }

 private:
  FunctionExpert inner_;
};

std::shared_ptr<HostedExpert> hosted(std::unique_ptr<ExpertBackend> backend) {
  return std::make_shared<HostedExpert>(std::move(backend), TaskPoolOptions{});
}

/// Keeps the device busy until destroyed, so that tasks gather.
class Gate {
 public:
  explicit Gate(Runtime& runtime) {
    auto reached = std::make_shared<std::promise<void>>();
    runtime.post([reached, open = opened_.get_future().share()] {
      reached->set_value();
      open.wait();
    });
    reached->get_future().wait();
  }
  ~Gate() { opened_.set_value(); }

 private:
  std::promise<void> opened_;
};

std::vector<std::shared_ptr<HostedExpert>> ffn_experts(const std::string& optimizer) {
  std::vector<std::shared_ptr<HostedExpert>> experts;
  OptimizerSettings settings;
  settings.kind = parse_optimizer(optimizer).value();
  settings.epsilon = 1e-3;  // So that a step moves little where a gradient is next to nothing.
  for (std::size_t i = 0; i < kExperts; ++i) experts.push_back(hosted(builtin("ffn", 24, settings, i + 1)));
  return experts;
}

struct Computed {
  std::vector<at::Tensor> answers;
  std::vector<ExpertSnapshot> snapshots;
};

/// A forward, a backward and another forward of every expert, whose tasks are all queued before the first is served.
Computed compute(bool grouped, const std::string& optimizer, const at::Tensor& x, const at::Tensor& gradient) {
  const auto experts = ffn_experts(optimizer);
  Computed computed;
  {
    Runtime runtime({.compute_threads = 2, .grouped = grouped, .on_batch = {}, .on_dropped = {}});
    for (const bool backward : {false, true, false}) {
      Answers answers(kExperts);
      {
        const Gate gate(runtime);
        for (std::size_t i = 0; i < kExperts; ++i) {
          auto task = backward ? answers.task(i, {x[static_cast<std::int64_t>(i)]}, {gradient})
                               : answers.task(i, {x[static_cast<std::int64_t>(i)]});
          const auto direction = backward ? Direction::kBackward : Direction::kForward;
          REQUIRE(runtime.submit(experts[i], direction, task).has_value());
        }
      }
      REQUIRE(answers.wait_all());
      for (std::size_t i = 0; i < kExperts; ++i) computed.answers.push_back(answers[i].value()[0]);
    }
    runtime.stop(1s);
  }
  for (const auto& expert : experts) computed.snapshots.push_back(expert->backend->snapshot());
  return computed;
}

}  // namespace

TEST_CASE("small batches of many experts give what each gives by itself", "[group]") {
  torch::manual_seed(static_cast<std::uint64_t>(dmoe::test::seed()));
  for (const std::string optimizer : {"adam", "sgd"}) {
    for (const std::int64_t rows : {1, 4, 13}) {
      const auto x = torch::randn({kExperts, rows, 24});
      const auto gradient = torch::randn({rows, 24});
      const auto together = compute(true, optimizer, x, gradient);
      const auto separate = compute(false, optimizer, x, gradient);
      for (std::size_t i = 0; i < together.answers.size(); ++i) {
        CHECK(torch::allclose(together.answers[i], separate.answers[i], 1e-4, 1e-5));
      }
      for (std::size_t i = 0; i < kExperts; ++i) {
        CHECK(together.snapshots[i].updates == 1);
        const auto& mine = together.snapshots[i].parameters;
        for (std::size_t p = 0; p < mine.size(); ++p) {
          CHECK(torch::allclose(mine[p].tensor, separate.snapshots[i].parameters[p].tensor, 1e-4, 1e-5));
        }
      }
    }
  }
}

TEST_CASE("small batches are computed at once on several threads and big ones are not", "[group]") {
  std::atomic<int> inside{0};
  std::atomic<int> most{0};
  const auto function = [&](const at::Tensor& x) {
    const int now = ++inside;
    for (int seen = most; now > seen && !most.compare_exchange_weak(seen, now);) {
    }
    // Small batches wait here for each other: only ones that run at once can go on.
    const auto limit = std::chrono::steady_clock::now() + 20s;
    while (x.size(0) == 1 && most < 2 && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
    --inside;
    return x + 1;
  };
  Runtime runtime({.compute_threads = 2, .grouped = true, .on_batch = {}, .on_dropped = {}});
  std::vector<std::shared_ptr<HostedExpert>> experts;
  for (int i = 0; i < 4; ++i) {
    experts.push_back(hosted(backend_of(std::make_unique<SideBySide>(function), "test." + std::to_string(i))));
  }
  for (const std::int64_t rows : {100, 1}) {
    Answers answers(experts.size());
    {
      const Gate gate(runtime);
      for (std::size_t i = 0; i < experts.size(); ++i) {
        auto task = answers.task(i, {torch::full({rows, 3}, double(i))});
        REQUIRE(runtime.submit(experts[i], Direction::kForward, task).has_value());
      }
    }
    REQUIRE(answers.wait_all());
    for (std::size_t i = 0; i < experts.size(); ++i) CHECK(answers[i].value()[0][0][0].item<float>() == float(i) + 1);
    CHECK(most == (rows == 1 ? 2 : 1));
  }
}

TEST_CASE("one expert that throws in a group fails alone", "[group][a3]") {
  Runtime runtime({.compute_threads = 2, .grouped = true, .on_batch = {}, .on_dropped = {}});
  std::vector<std::shared_ptr<HostedExpert>> experts;
  for (int i = 0; i < 4; ++i) {
    experts.push_back(hosted(backend_of(std::make_unique<SideBySide>([i](const at::Tensor& x) {
                                          if (i == 2) throw std::runtime_error("I am number two");
                                          return x + 1;
                                        }),
                                        "test." + std::to_string(i))));
  }
  Answers answers(experts.size());
  {
    const Gate gate(runtime);
    for (std::size_t i = 0; i < experts.size(); ++i) {
      auto task = answers.task(i, {torch::full({1, 3}, double(i))});
      REQUIRE(runtime.submit(experts[i], Direction::kForward, task).has_value());
    }
  }
  REQUIRE(answers.wait_all());
  for (std::size_t i = 0; i < experts.size(); ++i) CHECK(answers[i].has_value() == (i != 2));
  CHECK(answers[2].error().message.find("I am number two") != std::string::npos);
}

TEST_CASE("an expert with work in both directions is in a group once", "[group]") {
  std::atomic<int> clashes{0};
  std::vector<std::unique_ptr<std::atomic<int>>> inside;
  std::vector<std::shared_ptr<HostedExpert>> experts;
  for (int i = 0; i < 4; ++i) {
    inside.push_back(std::make_unique<std::atomic<int>>(0));
    const auto function = [&clashes, own = inside.back().get()](const at::Tensor& x) {
      if (own->fetch_add(1) != 0) ++clashes;
      auto y = x * 2;
      own->fetch_sub(1);
      return y;
    };
    experts.push_back(hosted(backend_of(std::make_unique<SideBySide>(function), "test." + std::to_string(i))));
  }
  Runtime runtime({.compute_threads = 2, .grouped = true, .on_batch = {}, .on_dropped = {}});
  for (int round = 0; round < 50; ++round) {
    Answers answers(2 * experts.size());
    {
      const Gate gate(runtime);
      for (std::size_t i = 0; i < experts.size(); ++i) {
        auto forward = answers.task(2 * i, {torch::ones({1, 3})});
        auto backward = answers.task(2 * i + 1, {torch::ones({1, 3})}, {torch::ones({1, 3})});
        REQUIRE(runtime.submit(experts[i], Direction::kForward, forward).has_value());
        REQUIRE(runtime.submit(experts[i], Direction::kBackward, backward).has_value());
      }
    }
    REQUIRE(answers.wait_all());
    for (std::size_t i = 0; i < 2 * experts.size(); ++i) CHECK(answers[i].value()[0][0][0].item<float>() == 2);
  }
  CHECK(clashes == 0);
}

TEST_CASE("products of few rows equal those of torch for every count and width", "[group]") {
  const at::NoGradGuard no_grad;
  torch::manual_seed(static_cast<std::uint64_t>(dmoe::test::seed()));
  for (std::int64_t rows = 1; rows <= kFewRows; ++rows) {
    for (const auto& [in, out] :
         std::vector<std::pair<std::int64_t, std::int64_t>>{{1, 1}, {7, 3}, {16, 5}, {33, 66}}) {
      const auto x = torch::randn({rows, in});
      const auto weight = torch::randn({out, in});
      const auto bias = torch::randn({out});
      REQUIRE(few_rows(x));
      const auto y = few_rows_linear(x, weight, bias);
      CHECK(torch::allclose(y, torch::nn::functional::linear(x, weight, bias), 1e-4, 1e-5));
      // A row does not depend on its neighbours.
      CHECK(same_bits(y.slice(0, 0, 1), few_rows_linear(x.slice(0, 0, 1), weight, bias)));
    }
  }
  const auto x = torch::randn({1, 4});
  {
    const FewRowsMode mode(false);
    CHECK_FALSE(few_rows(x));
  }
  CHECK(few_rows(x));
  CHECK_FALSE(few_rows(torch::randn({kFewRows + 1, 4})));
  CHECK_FALSE(few_rows(torch::randn({4, 2}).t()));
  CHECK_FALSE(few_rows(torch::randn({1, 4}, at::kDouble)));
  const at::AutoGradMode grad(true);
  CHECK_FALSE(few_rows(x));
}

TEST_CASE("d11 a snapshot that is copied in pieces is of the step at which it began", "[checkpoint][d11]") {
  const auto backend = builtin("ffn", 32, {});
  const auto x = torch::randn({4, 32});
  REQUIRE(backend->backward({x}, {x}, 0).has_value());
  const auto before = backend->snapshot();
  const auto begun = backend->reserve_snapshot();
  backend->begin_snapshot();
  CHECK_FALSE(backend->copy_snapshot(1'000));
  CHECK_FALSE(backend->copy_snapshot(1'000));
  REQUIRE(backend->forward({x}, 0).has_value());
  REQUIRE(backend->backward({x}, {x}, 0).has_value());
  CHECK(backend->copy_snapshot(1));  // The backward pass had to finish it.
  CHECK(begun->updates == 1);
  CHECK(same_bits(begun->parameters, before.parameters));
  CHECK(same_bits(begun->optimizer_state, before.optimizer_state));
  CHECK_FALSE(same_bits(backend->snapshot().parameters, before.parameters));
}

TEST_CASE("d11 a first step between a snapshot's reservation and its beginning is in it", "[checkpoint][d11]") {
  const auto backend = builtin("ffn", 32, {});
  const auto x = torch::randn({4, 32});
  const auto reserved = backend->reserve_snapshot();
  REQUIRE(reserved->optimizer_state.empty());
  REQUIRE(backend->backward({x}, {x}, 0).has_value());
  backend->begin_snapshot();
  const auto now = backend->snapshot();
  CHECK(backend->copy_snapshot(1UL << 30U));
  CHECK(reserved->updates == 1);
  CHECK(same_bits(reserved->parameters, now.parameters));
  CHECK(same_bits(reserved->optimizer_state, now.optimizer_state));
}

TEST_CASE("g1 a server uses the cores that other processes leave free", "[group][g1]") {
  const auto after = [](int most, double cores, double others) {
    ThreadChoice choice(most);
    for (int i = 0; i < 100; ++i) choice.observe(100ms, cores, others);
    return choice.threads();
  };
  CHECK(after(2, 2, 0) == 2);
  CHECK(after(2, 2, 0.3) == 2);
  CHECK(after(2, 2, 1) == 1);
  CHECK(after(2, 2, 2.5) == 1);
  CHECK(after(16, 16, 3) == 13);
  CHECK(after(4, 16, 3) == 4);
  ThreadGovernor told(3);
  CHECK(told.threads() == 3);
  ThreadGovernor free(0);
  for (int i = 0; i < 1'000; ++i) {
    const auto threads = free.threads();
    CHECK((threads >= 1 && threads <= effective_compute_threads(0)));
  }
}

TEST_CASE("g1 a core that others leave for moments is not taken, one that they leave for good is", "[group][g1]") {
  ThreadChoice choice(2);
  for (int i = 0; i < 5; ++i) choice.observe(100ms, 2, 1);
  REQUIRE(choice.threads() == 1);
  for (int i = 0; i < 100; ++i) {
    const bool pause = i % 4 == 3;
    CHECK(choice.observe(100ms, 2, pause ? 0 : 1) == 1);
  }
  int periods = 0;
  while (choice.observe(100ms, 2, 0) == 1) ++periods;
  CHECK(periods > 10);
  CHECK(periods < 60);
}

TEST_CASE("g1 a machine whose clock counts coarsely does not make the number of threads flutter", "[group][g1]") {
  ThreadChoice choice(2);
  for (int i = 0; i < 100; ++i) CHECK(choice.observe(100ms, 2, i % 2 == 0 ? 0.8 : 0) == 2);  // 0.4 on average.
  ThreadChoice careful(2);
  for (int i = 0; i < 20; ++i) careful.observe(100ms, 2, 1);
  for (int i = 0; i < 100; ++i) CHECK(careful.observe(100ms, 2, i % 2 == 0 ? 0.8 : 0) == 1);
}
