#include "gating/product_key_gate.hpp"

#include "tests/support/catch.hpp"

#include <torch/optim/adam.h>
#include <torch/serialize.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <cmath>
#include <sstream>

namespace dmoe::gating {
namespace {

TEST_CASE("the gate gives one block of logits per grid dimension", "[gating]") {
  torch::manual_seed(static_cast<std::uint64_t>(test::seed()));
  ProductKeyGate gate(ProductKeyGateOptions(6, {3, 5}));
  const auto input = torch::randn({4, 6});
  const auto logits = gate->forward(input);
  REQUIRE(logits.size() == 2);
  CHECK(logits[0].sizes() == torch::IntArrayRef({4, 3}));
  CHECK(logits[1].sizes() == torch::IntArrayRef({4, 5}));
  CHECK(torch::equal(torch::cat(logits, 1), gate->projection->forward(input)));
  CHECK(gate->forward(torch::empty({0, 6}))[1].size(0) == 0);
}

TEST_CASE("the logit of a cell is the sum over its coordinates and trains them", "[gating]") {
  torch::manual_seed(static_cast<std::uint64_t>(test::seed()));
  ProductKeyGate gate(ProductKeyGateOptions(6, {3, 5}));
  const auto logits = gate->forward(torch::randn({2, 6}));
  const auto cells = torch::tensor({0, 4, 2, 1, 1, 0, 1, 3}, torch::kInt64).view({2, 2, 2});
  const auto chosen = cell_logits(logits, cells);
  CHECK(chosen[0][1].item<float>() == (logits[0][0][2] + logits[1][0][1]).item<float>());
  CHECK(chosen[1][1].item<float>() == (logits[0][1][1] + logits[1][1][3]).item<float>());
  chosen.sum().backward();
  const auto grad = gate->projection->bias.grad();
  CHECK(torch::equal(grad, torch::tensor({1.F, 2.F, 1.F, 1.F, 1.F, 0.F, 1.F, 1.F})));
}

TEST_CASE("cell probabilities sum to one over the grid", "[gating][c14]") {
  torch::manual_seed(static_cast<std::uint64_t>(test::seed()));
  ProductKeyGate gate(ProductKeyGateOptions(4, {2, 3}));
  const auto logits = gate->forward(torch::randn({1, 4}));
  const auto cells = torch::tensor({0, 0, 0, 1, 0, 2, 1, 0, 1, 1, 1, 2}, torch::kInt64).view({1, 6, 2});
  CHECK(cell_log_probabilities(logits, cells).exp().sum().item<float>() == Approx(1.0F));
}

TEST_CASE("noise and cell dropout act in training only and leave every row a cell", "[gating]") {
  torch::manual_seed(static_cast<std::uint64_t>(test::seed()));
  ProductKeyGate gate(ProductKeyGateOptions(4, {5, 7}).noise(1.0).cell_dropout(0.9).temperature(2.0));
  const auto input = torch::randn({32, 4});
  const auto first = gate->forward(input);
  CHECK_FALSE(torch::equal(first[0], gate->forward(input)[0]));
  for (const auto& dimension : first) {
    CHECK(dimension.isinf().any().item<bool>());
    CHECK(dimension.isfinite().any(1).all().item<bool>());
  }
  gate->eval();
  const auto quiet = torch::cat(gate->forward(input), 1);
  CHECK(torch::allclose(quiet, gate->projection->forward(input) / 2.0));
}

TEST_CASE("cells are masked in a step of their own", "[gating]") {
  torch::manual_seed(static_cast<std::uint64_t>(test::seed()));
  ProductKeyGate gate(ProductKeyGateOptions(4, {5, 7}).cell_dropout(0.9));
  const auto scores = gate->scores(torch::randn({32, 4}));
  const auto masked = gate->masked(scores);
  for (std::size_t d = 0; d < scores.size(); ++d) {
    CHECK(scores[d].isfinite().all().item<bool>());
    CHECK((masked[d].isinf() | (masked[d] == scores[d])).all().item<bool>());
  }
  gate->eval();
  CHECK_FALSE(gate->masks_cells());
  CHECK(torch::equal(gate->masked(scores)[1], scores[1]));
}

TEST_CASE("the balancing loss has the gradient that finite differences give", "[gating][c15]") {
  torch::manual_seed(static_cast<std::uint64_t>(test::seed()));
  ProductKeyGate gate(ProductKeyGateOptions(3, {4, 3}));
  gate->to(torch::kDouble);
  const auto input = torch::randn({20, 3}, torch::kDouble);
  load_balancing_loss(gate->forward(input)).backward();
  const auto gradient = gate->projection->bias.grad().clone();
  CHECK(gradient.abs().max().item<double>() > 1e-4);
  const torch::NoGradGuard no_grad;
  auto bias = gate->projection->bias;
  const double step = 1e-7;  // Small enough that no row changes its best coordinate.
  for (std::int64_t i = 0; i < bias.numel(); ++i) {
    const double value = bias[i].item<double>();
    bias[i] = value + step;
    const double up = load_balancing_loss(gate->forward(input)).item<double>();
    bias[i] = value - step;
    const double down = load_balancing_loss(gate->forward(input)).item<double>();
    bias[i] = value;
    CHECK(gradient[i].item<double>() == Approx((up - down) / (2 * step)).margin(1e-5));
  }
}

TEST_CASE("statistics tell an even gate from one with a single favourite", "[gating][c15]") {
  const auto even = gate_statistics({torch::eye(4)}).front();  // Each row has its own best coordinate.
  CHECK(even.coefficient_of_variation == Approx(0).margin(1e-6));
  CHECK(torch::allclose(even.load, torch::full({4}, 0.25)));
  CHECK(gate_statistics({torch::zeros({3, 4})}).front().entropy == Approx(std::log(4.0)).epsilon(1e-4));
  auto favourite = torch::zeros({8, 4});
  favourite.select(1, 2).fill_(1e3);
  const auto skewed = gate_statistics({favourite, torch::zeros({8, 2})});
  REQUIRE(skewed.size() == 2);
  CHECK(skewed[0].entropy == Approx(0).margin(1e-6));
  CHECK(skewed[0].load[2].item<float>() == 1.0F);
  CHECK(skewed[0].coefficient_of_variation == Approx(std::sqrt(3.0)));  // Of (0, 0, 1, 0).
}

TEST_CASE("a skewed gate becomes even under the balancing loss", "[gating][c15]") {
  torch::manual_seed(static_cast<std::uint64_t>(test::seed()));
  ProductKeyGate gate(ProductKeyGateOptions(8, {4, 4}));
  {
    const torch::NoGradGuard no_grad;
    gate->projection->bias[0] = 5.0;
    gate->projection->bias[4] = 5.0;
  }
  torch::optim::Adam optimizer(gate->parameters(), torch::optim::AdamOptions(0.05));
  const auto input = torch::randn({256, 8});
  CHECK(gate_statistics(gate->forward(input))[0].coefficient_of_variation > 1.0);
  for (int i = 0; i < 200; ++i) {
    optimizer.zero_grad();
    load_balancing_loss(gate->forward(input)).backward();
    optimizer.step();
  }
  for (const auto& dimension : gate_statistics(gate->forward(input))) {
    CHECK(dimension.coefficient_of_variation < 0.6);
    CHECK(dimension.load.sum().item<double>() == Approx(1.0));
    CHECK(dimension.entropy > 0);
  }
}

TEST_CASE("balancing an empty batch is harmless", "[gating]") {
  ProductKeyGate gate(ProductKeyGateOptions(3, {4, 3}));
  const auto logits = gate->forward(torch::empty({0, 3}));
  CHECK(load_balancing_loss(logits).isfinite().item<bool>());
  CHECK(gate_statistics(logits)[0].load.sum().item<double>() == 0);
}

TEST_CASE("the gate is saved loaded cloned and printed like any module", "[gating]") {
  ProductKeyGate gate(ProductKeyGateOptions(4, {2, 3}));
  ProductKeyGate other(ProductKeyGateOptions(4, {2, 3}));
  std::stringstream file;
  torch::save(gate, file);
  torch::load(other, file);
  const auto input = torch::randn({2, 4});
  CHECK(torch::equal(gate->forward(input)[1], other->forward(input)[1]));
  const auto copy = std::dynamic_pointer_cast<ProductKeyGateImpl>(gate->clone());
  CHECK(torch::equal(copy->forward(input)[0], gate->forward(input)[0]));
  std::ostringstream text;
  text << *gate;
  CHECK(text.str().find("in_features=4, grid=[2, 3]") != std::string::npos);
  CHECK_THROWS(ProductKeyGate(ProductKeyGateOptions(4, {2, 0})));
  CHECK_THROWS(ProductKeyGate(ProductKeyGateOptions(0, {2})));
}

}  // namespace
}  // namespace dmoe::gating
