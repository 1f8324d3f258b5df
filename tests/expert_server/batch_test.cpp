#include "expert_server/batch_execution.hpp"
#include "expert_server/task_pool.hpp"
#include "tests/expert_server/fixtures.hpp"
#include "tests/support/captured_log.hpp"
#include "tests/support/catch.hpp"

#include <chrono>
#include <cmath>
#include <limits>

using namespace dmoe;
using namespace dmoe::expert_server;
using namespace dmoe::expert_server::test;
using dmoe::test::CapturedLog;

namespace {

/// Doubles its input; throws when x[row][0] is 13 in some row.
std::unique_ptr<ExpertBackend> superstitious(std::vector<NamedTensor> parameters = {}) {
  const auto weight = parameters.empty() ? torch::full({1}, 2.0) : parameters[0].tensor;
  return backend_of(std::make_unique<FunctionExpert>(
      3,
      [weight](const at::Tensor& x) {
        if ((x.select(1, 0) == 13).any().item<bool>()) throw std::runtime_error("I fear 13");
        return x * weight;
      },
      std::move(parameters)));
}

std::vector<Task> batch_of(Answers& answers, const std::vector<at::Tensor>& inputs,
                           const std::vector<at::Tensor>& gradients = {}) {
  std::vector<Task> tasks;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    tasks.push_back(answers.task(i, {inputs[i]}, gradients.empty() ? Tensors{} : Tensors{gradients[i]}));
  }
  return tasks;
}

}  // namespace

TEST_CASE("rows of many callers are computed together and split again", "[batch]") {
  auto calls = std::make_shared<int>(0);
  const auto backend = backend_of(std::make_unique<FunctionExpert>(3, [calls](const at::Tensor& x) {
    ++*calls;
    return x + 1;
  }));
  Answers answers(3);
  BatchMemory memory;
  const Tensors inputs{torch::randn({2, 3}), torch::randn({1, 3}), torch::randn({4, 3})};
  CHECK(execute_batch(*backend, Direction::kForward, batch_of(answers, inputs), memory) == 0);
  CHECK(*calls == 1);
  for (std::size_t i = 0; i < inputs.size(); ++i) CHECK(torch::equal(answers[i].value()[0], inputs[i] + 1));
}

TEST_CASE("a3 an expert that throws fails only the caller whose rows it dislikes", "[batch]") {
  const auto backend = superstitious();
  Answers answers(8);
  BatchMemory memory;
  Tensors inputs;
  for (int i = 0; i < 8; ++i) inputs.push_back(torch::full({2, 3}, i == 5 ? 13.0 : double(i)));
  CHECK(execute_batch(*backend, Direction::kForward, batch_of(answers, inputs), memory) == 1);
  for (std::size_t i = 0; i < 8; ++i) {
    if (i == 5) {
      REQUIRE(answers[i].has_error());
      CHECK(answers[i].error().message.find("I fear 13") != std::string::npos);
    } else {
      CHECK(torch::equal(answers[i].value()[0], inputs[i] * 2));
    }
  }
}

TEST_CASE("a backward batch is one step with the sum of its gradients", "[batch]") {
  auto weight = torch::full({1}, 2.0).requires_grad_(true);
  const auto backend = superstitious({{"weight", weight}});
  Answers answers(2);
  BatchMemory memory;
  const Tensors inputs{torch::ones({1, 3}), torch::ones({1, 3})};
  const Tensors gradients{torch::ones({1, 3}), torch::ones({1, 3})};
  CHECK(execute_batch(*backend, Direction::kBackward, batch_of(answers, inputs, gradients), memory) == 0);
  CHECK(backend->updates() == 1);
  CHECK(weight.item<float>() == Approx(2 - 0.1 * 6));
  CHECK(torch::equal(answers[1].value()[0], torch::full({1, 3}, 2.0)));
}

TEST_CASE("f2 gradients that are not finite are refused and the neighbour still learns", "[batch]") {
  auto weight = torch::full({1}, 2.0).requires_grad_(true);
  const auto backend = superstitious({{"weight", weight}});
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    weight.detach().fill_(2);
    Answers answers(3);
    BatchMemory memory;
    const Tensors inputs{torch::ones({1, 3}), torch::ones({1, 3}), torch::full({1, 3}, bad)};
    const Tensors gradients{torch::ones({1, 3}), torch::full({1, 3}, bad), torch::ones({1, 3})};
    CHECK(execute_batch(*backend, Direction::kBackward, batch_of(answers, inputs, gradients), memory) == 2);
    CHECK(answers[0].has_value());
    CHECK(answers[1].error().code == Errc::kInvalidArgument);
    CHECK(answers[2].error().code == Errc::kInvalidArgument);
    CHECK(weight.item<float>() == Approx(2 - 0.1 * 3));
  }
}

TEST_CASE("f2 a gradient that overflows on its way back is refused alone", "[batch]") {
  auto weight = torch::full({1}, 1e30).requires_grad_(true);
  const auto backend = superstitious({{"weight", weight}});
  Answers answers(2);
  BatchMemory memory;
  const Tensors inputs{torch::ones({1, 3}), torch::ones({1, 3})};
  const Tensors gradients{torch::full({1, 3}, 1e-3), torch::full({1, 3}, 1e30)};
  CHECK(execute_batch(*backend, Direction::kBackward, batch_of(answers, inputs, gradients), memory) == 1);
  CHECK(answers[0].has_value());
  CHECK(answers[1].error().code == Errc::kInvalidArgument);
  CHECK(backend->updates() == 1);
  CHECK(torch::isfinite(weight).all().item<bool>());
}

TEST_CASE("an output that is not finite fails only its own caller", "[batch]") {
  const auto backend = backend_of(std::make_unique<FunctionExpert>(3, [](const at::Tensor& x) { return x.log(); }));
  Answers answers(2);
  BatchMemory memory;
  const Tensors inputs{torch::full({1, 3}, -1.0), torch::ones({1, 3})};
  CHECK(execute_batch(*backend, Direction::kForward, batch_of(answers, inputs), memory) == 1);
  CHECK(answers[0].error().code == Errc::kInvalidArgument);
  CHECK(torch::equal(answers[1].value()[0], torch::zeros({1, 3})));
}

TEST_CASE("a18 a call of zero rows is answered and teaches nothing", "[batch]") {
  const auto backend = builtin("ffn", 8, OptimizerSettings{});
  const auto x = torch::randn({4, 8});
  REQUIRE(backend->backward({x}, {torch::randn({4, 8})}, 0).has_value());  // Momentum that could move weights.
  const auto before = backend->snapshot();
  Answers answers(2);
  BatchMemory memory;
  std::vector<Task> backward;
  backward.push_back(answers.task(0, {torch::zeros({0, 8})}, {torch::zeros({0, 8})}));
  CHECK(execute_batch(*backend, Direction::kBackward, std::move(backward), memory) == 0);
  std::vector<Task> forward;
  forward.push_back(answers.task(1, {torch::zeros({0, 8})}));
  CHECK(execute_batch(*backend, Direction::kForward, std::move(forward), memory) == 0);
  CHECK(answers[0].value()[0].sizes() == at::IntArrayRef({0, 8}));
  CHECK(answers[1].value()[0].sizes() == at::IntArrayRef({0, 8}));
  const auto after = backend->snapshot();
  CHECK(after.updates == before.updates);
  CHECK(same_bits(before.parameters, after.parameters));
  CHECK(same_bits(before.optimizer_state, after.optimizer_state));
}

TEST_CASE("inputs are never written to", "[batch]") {
  const auto backend = builtin("ffn", 8, OptimizerSettings{});
  const auto x = torch::randn({4, 8});
  const auto gradient = torch::randn({4, 8});
  const auto x_before = x.clone();
  const auto gradient_before = gradient.clone();
  Answers answers(2);
  BatchMemory memory;
  execute_batch(*backend, Direction::kForward, batch_of(answers, {x}), memory);
  std::vector<Task> backward;
  backward.push_back(answers.task(1, {x}, {gradient}));
  execute_batch(*backend, Direction::kBackward, std::move(backward), memory);
  CHECK(same_bits(x, x_before));
  CHECK(same_bits(gradient, gradient_before));
}

TEST_CASE("batch memory is not reused while somebody reads it", "[batch]") {
  const auto backend = builtin("nop", 3, plain_sgd());
  BatchMemory memory;
  Answers first(2);
  Answers second(2);
  const Tensors ones{torch::ones({2, 3}), torch::ones({2, 3})};
  const Tensors twos{torch::full({2, 3}, 2.0), torch::full({2, 3}, 2.0)};
  execute_batch(*backend, Direction::kForward, batch_of(first, ones), memory);
  execute_batch(*backend, Direction::kForward, batch_of(second, twos), memory);
  CHECK(torch::equal(first[0].value()[0], ones[0]));
  CHECK(torch::equal(second[1].value()[0], twos[1]));
}

TEST_CASE("a6 a task of more rows than a batch may have is refused with the limit", "[pool]") {
  TaskPool pool({.max_batch_rows = 64});
  Answers answers(4);
  auto whole = answers.task(0, {torch::zeros({64, 3})});
  CHECK(pool.push(whole).has_value());
  for (const std::int64_t rows : {65, 10'000}) {
    auto large = answers.task(1, {torch::zeros({rows, 3})});
    const auto refused = pool.push(large);
    REQUIRE(refused.has_error());
    CHECK(refused.error().code == Errc::kInvalidArgument);
    CHECK(refused.error().message.find("64") != std::string::npos);
    CHECK(large.inputs.size() == 1);
  }
}

TEST_CASE("a full pool says when to come back", "[pool]") {
  TaskPool pool({.max_batch_rows = 4, .max_queued_batches = 2, .max_queued_tasks = 100});
  Answers answers(4);
  for (std::size_t i = 0; i < 2; ++i) {
    auto task = answers.task(i, {torch::zeros({4, 3})});
    REQUIRE(pool.push(task).has_value());
  }
  auto late = answers.task(2, {torch::zeros({1, 3})});
  const auto refused = pool.push(late);
  REQUIRE(refused.has_error());
  CHECK(refused.error().code == Errc::kOverloaded);
  CHECK(refused.error().retry_after.has_value());
}

TEST_CASE("a batch takes tasks of one shape in order up to the limit", "[pool]") {
  TaskPool pool({.max_batch_rows = 4});
  Answers answers(5);
  const std::vector<at::Tensor> inputs{torch::zeros({2, 5, 3}), torch::zeros({1, 7, 3}), torch::zeros({1, 5, 3}),
                                       torch::zeros({2, 5, 3}), torch::zeros({1, 5, 3})};
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    auto task = answers.task(i, {inputs[i]});
    REQUIRE(pool.push(task).has_value());
  }
  std::vector<Task> dropped;
  const auto now = std::chrono::steady_clock::now();
  CHECK(pool.take_batch(now, dropped).size() == 3);  // 2 + 1 + 1 rows of shape [5, 3].
  const auto second = pool.take_batch(now, dropped);
  REQUIRE(second.size() == 1);
  CHECK(second[0].inputs[0].size(1) == 7);
  CHECK(pool.take_batch(now, dropped).size() == 1);
  CHECK(pool.empty());
  CHECK(pool.rows() == 0);
  CHECK(dropped.empty());
}

TEST_CASE("expired and cancelled tasks are not part of a batch", "[pool]") {
  TaskPool pool({});
  Answers answers(2);
  Answers abandoned(1);
  auto expired = answers.task(0, {torch::zeros({1, 3})});
  expired.deadline = std::chrono::steady_clock::now();
  auto cancelled = abandoned.task(0, {torch::zeros({1, 3})});
  abandoned.cancel();
  auto good = answers.task(1, {torch::zeros({1, 3})});
  REQUIRE(pool.push(expired).has_value());
  REQUIRE(pool.push(cancelled).has_value());
  REQUIRE(pool.push(good).has_value());
  std::vector<Task> dropped;
  CHECK(pool.take_batch(std::chrono::steady_clock::now(), dropped).size() == 1);
  CHECK(dropped.size() == 2);
}

TEST_CASE("f2 a huge gradient is shortened before it meets its neighbour's and its caller still gets it whole",
          "[batch][f2]") {
  auto weight = torch::full({1}, 2.0).requires_grad_(true);
  const auto backend = superstitious({{"weight", weight}});
  const CapturedLog log;
  const auto one = torch::ones({1, 3});
  for (const double huge : {1e30, -1e30, 1e6}) {
    weight.detach().fill_(2);
    Answers answers(2);
    BatchMemory memory;
    auto tasks = batch_of(answers, {one, one}, {torch::full({1, 3}, 1e-3), torch::full({1, 3}, huge)});
    CHECK(execute_batch(*backend, Direction::kBackward, std::move(tasks), memory) == 0);
    CHECK(torch::allclose(answers[0].value()[0], torch::full({1, 3}, 2e-3)));
    CHECK(torch::allclose(answers[1].value()[0], torch::full({1, 3}, 2 * huge)));
    // It teaches as a gradient of norm 1,000 in the same direction: the weight's gradient is the sum of its elements.
    const double taught = std::copysign(1'000 * std::sqrt(3.0), huge);
    CHECK(weight.item<double>() == Approx(2 - 0.1 * (taught + 3e-3)).epsilon(1e-4));
  }
  // Once a second, so perhaps not in the first of these batches.
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds{30};
  const auto logged = [&] { return log.warned_of("sent expert test.0 a gradient of norm"); };
  while (!logged() && std::chrono::steady_clock::now() < end) {
    Answers answers(1);
    BatchMemory memory;
    execute_batch(*backend, Direction::kBackward, batch_of(answers, {one}, {torch::full({1, 3}, 1e30)}), memory);
  }
  CHECK(logged());
}

TEST_CASE("f2 a gradient of usual length is used to the bit", "[batch][f2]") {
  auto weight = torch::full({1}, 2.0).requires_grad_(true);
  const auto backend = superstitious({{"weight", weight}});
  Answers answers(1);
  BatchMemory memory;
  const auto gradient = torch::full({4, 3}, 500.0);  // √3 × 500 per row: below the limit.
  execute_batch(*backend, Direction::kBackward, batch_of(answers, {torch::ones({4, 3})}, {gradient}), memory);
  CHECK(torch::equal(answers[0].value()[0], gradient * 2));
  CHECK(weight.item<float>() == Approx(2 - 0.1 * 6'000));
}

TEST_CASE("a3 what fails in a batch leaves its neighbours the bits and the step that they have without it",
          "[batch][a3]") {
  // One call's gradient overflows on its way back, another makes the expert throw.
  const auto made = [](const at::Tensor& weight) {
    return backend_of(std::make_unique<FunctionExpert>(
        3,
        [weight](const at::Tensor& x) {
          if ((x.select(1, 0) == 13).any().item<bool>()) throw std::runtime_error("I fear 13");
          return x * weight * 1e36;
        },
        std::vector<NamedTensor>{{"weight", weight}}));
  };
  Tensors inputs;
  Tensors gradients;
  for (int i = 0; i < 6; ++i) {
    inputs.push_back(torch::randn({2, 3}));
    gradients.push_back(1e-37 * torch::randn({2, 3}));
  }
  const auto run = [&](bool with_bad, std::vector<Outcome>& outcomes) {
    const auto backend = made(torch::full({1}, 2.0).requires_grad_(true));
    auto x = inputs;
    auto g = gradients;
    if (with_bad) {
      x.push_back(torch::ones({2, 3}));
      g.push_back(torch::full({2, 3}, 500.0));  // Short enough not to be clipped.
      x.push_back(torch::full({2, 3}, 13.0));
      g.push_back(torch::ones({2, 3}));
    }
    Answers answers(x.size());
    BatchMemory memory;
    CHECK(execute_batch(*backend, Direction::kBackward, batch_of(answers, x, g), memory) == (with_bad ? 2 : 0));
    for (std::size_t i = 0; i < x.size(); ++i) outcomes.push_back(answers[i]);
    CHECK(backend->updates() == 1);
    return backend->snapshot().parameters.at(0).tensor;
  };
  std::vector<Outcome> with;
  std::vector<Outcome> without;
  CHECK(same_bits(run(true, with), run(false, without)));
  for (std::size_t i = 0; i < inputs.size(); ++i) CHECK(same_bits(with[i].value()[0], without[i].value()[0]));
  CHECK(with[6].error().code == Errc::kInvalidArgument);
  CHECK(with[7].error().message.find("I fear 13") != std::string::npos);
}
