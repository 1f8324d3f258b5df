#include "expert_server/optimizer.hpp"

#include "tests/expert_server/fixtures.hpp"
#include "tests/support/catch.hpp"

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <limits>

using namespace dmoe;
using namespace dmoe::expert_server;

namespace {

/// Runs `steps` steps of ours and of torch's on the same gradients, and compares the weights.
template <class TorchOptimizer, class TorchOptions>
void compare(const OptimizerSettings& settings, const TorchOptions& options, int steps) {
  torch::manual_seed(static_cast<std::uint64_t>(dmoe::test::seed()));
  const auto start = torch::randn({37, 5});
  auto ours = start.clone();
  auto theirs = start.clone().requires_grad_(true);
  Optimizer optimizer(settings, {{"weight", ours}});
  TorchOptimizer reference({theirs}, options);
  for (int i = 0; i < steps; ++i) {
    const auto gradient = torch::randn({37, 5});
    theirs.mutable_grad() = gradient.clone();
    reference.step();
    REQUIRE(optimizer.step({gradient}).has_value());
  }
  CHECK(torch::allclose(ours, theirs.detach(), 1e-5, 1e-6));
}

}  // namespace

TEST_CASE("Adam with AMSGrad takes the same steps as libtorch", "[optimizer]") {
  OptimizerSettings settings;
  settings.learning_rate = 0.01;
  settings.weight_decay = 0.1;
  settings.clip_grad_norm = 0;
  compare<torch::optim::Adam>(settings, torch::optim::AdamOptions(0.01).amsgrad(true).weight_decay(0.1), 20);
}

TEST_CASE("SGD with momentum takes the same steps as libtorch", "[optimizer]") {
  auto settings = expert_server::test::plain_sgd(0.05);
  settings.momentum = 0.9;
  settings.weight_decay = 0.01;
  compare<torch::optim::SGD>(settings, torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01), 10);
}

TEST_CASE("AdamW and plain Adam and Nesterov take the same steps as libtorch", "[optimizer]") {
  OptimizerSettings adamw;
  adamw.kind = OptimizerKind::kAdamW;
  adamw.learning_rate = 0.01;
  adamw.weight_decay = 0.1;
  adamw.clip_grad_norm = 0;
  compare<torch::optim::AdamW>(adamw, torch::optim::AdamWOptions(0.01).amsgrad(true).weight_decay(0.1), 10);
  adamw.amsgrad = false;
  compare<torch::optim::AdamW>(adamw, torch::optim::AdamWOptions(0.01).weight_decay(0.1), 10);
  auto adam = adamw;
  adam.kind = OptimizerKind::kAdam;
  compare<torch::optim::Adam>(adam, torch::optim::AdamOptions(0.01).weight_decay(0.1), 10);
  auto nesterov = expert_server::test::plain_sgd(0.05);
  nesterov.momentum = 0.9;
  nesterov.nesterov = true;
  compare<torch::optim::SGD>(nesterov, torch::optim::SGDOptions(0.05).momentum(0.9).nesterov(true), 10);
}

TEST_CASE("gradients are clipped to a common norm", "[optimizer]") {
  auto settings = expert_server::test::plain_sgd(1.0);
  settings.clip_grad_norm = 1;
  auto first = torch::zeros({1});
  auto second = torch::zeros({1});
  Optimizer optimizer(settings, {{"a", first}, {"b", second}});
  const auto norm = optimizer.step({torch::full({1}, 3.0), torch::full({1}, 4.0)});
  CHECK(norm.value() == Approx(5));
  CHECK(first.item<float>() == Approx(-0.6));
  CHECK(second.item<float>() == Approx(-0.8));
}

TEST_CASE("f2 gradients that are not finite change nothing and huge ones are clipped", "[optimizer]") {
  auto weight = torch::ones({3});
  Optimizer optimizer(OptimizerSettings{}, {{"weight", weight}});
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    const auto refused = optimizer.step({torch::tensor({1.F, bad, 1.F})});
    REQUIRE(refused.has_error());
    CHECK(refused.error().code == Errc::kInvalidArgument);
    CHECK(torch::equal(weight, torch::ones({3})));
    CHECK(optimizer.state().empty());
  }
  REQUIRE(optimizer.step({torch::full({3}, 1e30F)}).has_value());
  REQUIRE(optimizer.step({torch::full({3}, -1e36F)}).has_value());
  CHECK(torch::isfinite(weight).all().item<bool>());
}

TEST_CASE("an optimizer goes on exactly from its saved state", "[optimizer]") {
  auto weight = torch::randn({8});
  Optimizer optimizer(OptimizerSettings{}, {{"weight", weight}});
  for (int i = 0; i < 3; ++i) REQUIRE(optimizer.step({torch::randn({8})}).has_value());
  auto copy = weight.clone();
  Optimizer resumed(OptimizerSettings{}, {{"weight", copy}});
  auto saved = optimizer.state();
  for (auto& item : saved) item.tensor = item.tensor.clone();
  REQUIRE(resumed.load_state(saved).has_value());
  const auto gradient = torch::randn({8});
  REQUIRE(optimizer.step({gradient}).has_value());
  REQUIRE(resumed.step({gradient}).has_value());
  CHECK(expert_server::test::same_bits(weight, copy));
}

TEST_CASE("a state of another shape is refused and nothing changes", "[optimizer]") {
  auto narrow = torch::randn({8});
  Optimizer donor(OptimizerSettings{}, {{"weight", narrow}});
  REQUIRE(donor.step({torch::randn({8})}).has_value());
  auto wide = torch::randn({9});
  Optimizer other(OptimizerSettings{}, {{"weight", wide}});
  CHECK(other.load_state(donor.state()).has_error());
  CHECK(other.state().empty());
}
