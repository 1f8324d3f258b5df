// Dropout of grid cells where few of them hold an expert.
#include "dmoe/switch_dmoe.hpp"
#include "tests/dmoe/swarm.hpp"

#include "tests/support/catch.hpp"

namespace dmoe {
namespace {

using namespace std::chrono_literals;
using test::random_input;
using test::reference;
using test::Swarm;

constexpr std::int64_t kRows = 64;

/// Two live experts in a grid of 512 cells of which 95 in 100 are masked: nine rows in ten lose both.
struct SparseGrid {
  explicit SparseGrid(std::int64_t k_min) {
    auto options = swarm.options().k_best(2).k_min(k_min).cell_dropout(0.95);
    options.grid({512});
    layer = swarm.layer(options);
  }

  /// Per row the mixture of `experts`, by the logits without dropout.
  torch::Tensor expected(const torch::Tensor& input, const std::vector<ExpertUid>& experts) {
    layer->gate->eval();
    auto output = reference(swarm, layer, input, std::vector<std::vector<ExpertUid>>(kRows, experts));
    layer->gate->train();
    return output;
  }

  Swarm swarm{2, {2}, 4};
  DMoE layer{nullptr};
};

torch::Tensor equal_rows(const torch::Tensor& a, const torch::Tensor& b) {
  return torch::isclose(a, b, 1e-9, 1e-12).all(1);
}

TEST_CASE("a row that dropout leaves no live expert is searched one without dropout", "[dmoe]") {
  SparseGrid sparse(1);
  const auto input = random_input(kRows, 4);
  const auto output = sparse.layer->forward(input);
  CHECK(sparse.layer->stats().rows_dropped == 0);
  const auto& experts = sparse.swarm.experts();
  const auto both = equal_rows(output, sparse.expected(input, experts));
  const auto first = equal_rows(output, sparse.expected(input, {experts[0]}));
  const auto second = equal_rows(output, sparse.expected(input, {experts[1]}));
  CHECK((both | first | second).all().item<bool>());
  CHECK(both.sum().item<std::int64_t>() > kRows / 2);
}

TEST_CASE("dropout leaves each row k_min live experts and the gradients of its undropped scores", "[dmoe]") {
  SparseGrid sparse(2);
  auto input = random_input(kRows, 4).requires_grad_();
  const auto output = sparse.layer->forward(input);
  output.pow(2).sum().backward();
  const auto input_gradient = input.grad().clone();
  const auto gate_gradient = sparse.layer->gate->projection->weight.grad().clone();
  input.mutable_grad().reset();
  sparse.layer->zero_grad();
  const auto expected = sparse.expected(input, sparse.swarm.experts());
  CHECK(torch::allclose(output, expected, 1e-9, 1e-12));
  expected.pow(2).sum().backward();
  CHECK(torch::allclose(input_gradient, input.grad(), 1e-9, 1e-12));
  CHECK(torch::allclose(gate_gradient, sparse.layer->gate->projection->weight.grad(), 1e-9, 1e-12));
  CHECK(sparse.layer->routing().entropy > 0);
}

TEST_CASE("a row whose experts fail may get one that dropout had masked", "[dmoe][b25]") {
  SparseGrid sparse(1);
  auto input = random_input(kRows, 4).requires_grad_();
  sparse.swarm.host(1).kill();
  const auto output = sparse.layer->forward(input);
  CHECK(torch::allclose(output, sparse.expected(input, {sparse.swarm.experts()[0]}), 1e-9, 1e-12));
  output.sum().backward();
  CHECK(sparse.layer->gate->projection->weight.grad().isfinite().all().item<bool>());
}

TEST_CASE("a switch layer of a sparse grid loses no row to dropout", "[dmoe][switch]") {
  Swarm swarm(1, {2}, 4);
  auto layer_options = swarm.options().cell_dropout(0.95);
  layer_options.grid({512});
  SwitchDMoE layer(swarm.client(), SwitchDMoEOptions(layer_options).capacity_factor(0));
  layer->to(torch::kDouble);
  const auto [output, loss] = layer->forward_balanced(random_input(kRows, 4));
  CHECK((output != 0).any(1).all().item<bool>());
  (output.sum() + loss).backward();
  const auto gradient = layer->layer->gate->projection->weight.grad();
  CHECK(gradient.isfinite().all().item<bool>());
  CHECK(gradient.abs().max().item<double>() > 0);
}

}  // namespace
}  // namespace dmoe
