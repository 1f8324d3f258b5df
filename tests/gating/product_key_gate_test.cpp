#include "gating/product_key_gate.hpp"

#include "tests/support/catch.hpp"

#include <torch/torch.h>

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
