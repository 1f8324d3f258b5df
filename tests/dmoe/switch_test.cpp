// A Switch layer: one expert per row, a limit of rows per expert, a loss that balances.
#include "dmoe/switch_dmoe.hpp"

#include "tests/dmoe/swarm.hpp"
#include "tests/support/catch.hpp"

#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <sstream>

namespace dmoe {
namespace {

using test::Fault;
using test::random_input;
using test::ranked;
using test::Swarm;

SwitchDMoE switch_layer(Swarm& swarm, const SwitchDMoEOptions& options) {
  SwitchDMoE layer(swarm.client(), options);
  layer->to(torch::kDouble);
  return layer;
}

/// [rows, experts]: the softmax over the experts' logits.
torch::Tensor probabilities(Swarm& swarm, SwitchDMoE& layer, const torch::Tensor& input) {
  const auto logits = layer->layer->gate->forward(input);
  std::vector<torch::Tensor> scores;
  for (const auto& uid : swarm.experts()) {
    torch::Tensor score;
    for (std::size_t d = 0; d < logits.size(); ++d) {
      const auto part = logits[d].select(1, static_cast<std::int64_t>(uid.coordinates[d]));
      score = d == 0 ? part : score + part;
    }
    scores.push_back(score);
  }
  return torch::stack(scores, 1).softmax(1);
}

torch::Tensor expected(Swarm& swarm, SwitchDMoE& layer, const torch::Tensor& input) {
  const auto p = probabilities(swarm, layer, input);
  std::vector<torch::Tensor> rows;
  for (std::int64_t row = 0; row < input.size(0); ++row) {
    const auto best = p[row].argmax().item<std::int64_t>();
    rows.push_back(p[row][best] * swarm.local(swarm.experts()[static_cast<std::size_t>(best)], input[row]));
  }
  return torch::stack(rows);
}

TEST_CASE("a switch layer scales its expert's output by the expert's probability", "[dmoe][switch][c14]") {
  Swarm swarm(3, {3, 2}, 4);
  auto layer = switch_layer(swarm, SwitchDMoEOptions(swarm.options()).capacity_factor(0));
  auto input = random_input(10, 4).requires_grad_();
  const auto output = layer->forward(input);
  CHECK(torch::allclose(output, expected(swarm, layer, input), 1e-9, 1e-12));

  output.pow(2).sum().backward();
  const auto of_input = input.grad().clone();
  const auto of_gate = layer->layer->gate->projection->weight.grad().clone();
  input.mutable_grad().reset();
  layer->zero_grad();
  expected(swarm, layer, input).pow(2).sum().backward();
  CHECK(torch::allclose(of_input, input.grad(), 1e-9, 1e-12));
  CHECK(torch::allclose(of_gate, layer->layer->gate->projection->weight.grad(), 1e-9, 1e-12));
  CHECK(of_gate.abs().max().item<double>() > 0);
}

TEST_CASE("an expert computes the rows that want it most and no more than its capacity", "[dmoe][switch][c17]") {
  Swarm swarm(2, {4}, 4);
  for (const auto overflow : {Overflow::kZero, Overflow::kPassThrough}) {
    auto layer = switch_layer(swarm, SwitchDMoEOptions(swarm.options()).capacity_factor(1).overflow(overflow));
    {
      const torch::NoGradGuard no_grad;
      layer->layer->gate->projection->bias[2] += 100;  // Everyone wants expert 2.
    }
    auto input = random_input(12, 4).requires_grad_();
    const auto logits = layer->layer->gate->forward(input)[0].select(1, 2);
    const auto kept = std::get<1>(logits.topk(3));  // 12 rows, 4 experts: 3 each.
    auto where = torch::zeros({12, 1}, torch::kDouble);
    where.index_fill_(0, kept, 1);
    const auto rest = overflow == Overflow::kZero ? torch::zeros_like(input) : input;
    const auto output = layer->forward(input);
    const auto wanted = expected(swarm, layer, input) * where + rest * (1 - where);
    CHECK(torch::allclose(output, wanted, 1e-9, 1e-12));
    const auto stats = layer->layer->stats();
    CHECK(stats.rows_over_capacity == 9);
    CHECK(stats.rows_dropped == 0);
    CHECK(stats.calls == 1);

    output.sum().backward();
    const auto gradient = input.grad().clone();
    input.mutable_grad().reset();
    wanted.sum().backward();
    CHECK(torch::allclose(gradient, input.grad(), 1e-9, 1e-12));
    CHECK(layer->layer->routing().chosen.at({"ffn", {2}}) == 12);
  }
}

TEST_CASE("the balancing loss has the gradient that finite differences say", "[dmoe][switch][c15]") {
  Swarm swarm(2, {3, 2}, 4);
  auto layer = switch_layer(swarm, SwitchDMoEOptions(swarm.options()));
  const auto input = random_input(16, 4);
  const auto p = probabilities(swarm, layer, input);
  const auto load = torch::bincount(p.argmax(1), {}, 6).to(torch::kDouble) / 16;
  layer->forward_balanced(input).second.backward();
  const auto gradient = layer->layer->gate->projection->weight.grad().clone();
  CHECK(gradient.abs().max().item<double>() > 1e-4);
  const torch::NoGradGuard no_grad;
  CHECK(layer->forward_balanced(input).second.item<double>() ==
        Approx(((load * p.mean(0)).sum() * 6).item<double>()).epsilon(1e-6));
  // With the load held: it is a constant of the loss.
  auto weight = layer->layer->gate->projection->weight;
  const auto loss = [&] { return ((load * probabilities(swarm, layer, input).mean(0)).sum() * 6).item<double>(); };
  for (std::int64_t i = 0; i < weight.size(0); ++i) {
    for (std::int64_t j = 0; j < weight.size(1); ++j) {
      const double value = weight[i][j].item<double>();
      weight[i][j] = value + 1e-6;
      const double up = loss();
      weight[i][j] = value - 1e-6;
      const double down = loss();
      weight[i][j] = value;
      CHECK(gradient[i][j].item<double>() == Approx((up - down) / 2e-6).epsilon(1e-4).margin(1e-7));
    }
  }
}

TEST_CASE("with its loss a skewed switch layer becomes even", "[dmoe][switch][c15]") {
  Swarm swarm(2, {4}, 8);
  auto layer = switch_layer(swarm, SwitchDMoEOptions(swarm.options()));
  {
    const torch::NoGradGuard no_grad;
    layer->layer->gate->projection->bias[1] += 2;
  }
  torch::optim::SGD optimizer(layer->parameters(), 0.1);
  const auto input = random_input(128, 8);
  layer->forward_balanced(input);
  const double before = layer->layer->routing().coefficient_of_variation();
  CHECK(before > 0.8);
  for (int step = 0; step < 200; ++step) {
    optimizer.zero_grad();
    layer->forward_balanced(input).second.backward();
    optimizer.step();
  }
  layer->layer->reset_routing();
  layer->forward_balanced(input);
  CHECK(layer->layer->routing().coefficient_of_variation() < 0.5);
}

TEST_CASE("jitter reaches the gate alone and leaves the caller's tensor as it was", "[dmoe][switch][c15]") {
  Swarm swarm(1, {2}, 4);
  auto layer = switch_layer(swarm, SwitchDMoEOptions(swarm.options()).jitter(0.5).capacity_factor(0));
  const auto input = random_input(6, 4);
  const auto kept = input.clone();
  const auto first = layer->forward(input);
  const auto second = layer->forward(input);
  CHECK(torch::equal(input, kept));
  CHECK_FALSE(torch::equal(first, second));
  layer->eval();
  CHECK(torch::equal(layer->forward(input), layer->forward(input)));
  for (std::size_t i = 0; i < swarm.experts().size(); ++i) {
    for (const auto& sent : swarm.host(0).last_inputs(swarm.experts()[i])) {
      for (std::int64_t row = 0; row < sent.size(0); ++row) CHECK((input == sent[row]).all(1).any().item<bool>());
    }
  }
}

TEST_CASE("a failed expert's rows go to the next best with that one's probability", "[dmoe][switch][c3]") {
  Swarm swarm(2, {4}, 4);
  auto layer = switch_layer(swarm, SwitchDMoEOptions(swarm.options()).capacity_factor(0));
  const auto input = random_input(5, 4);
  const auto p = probabilities(swarm, layer, input).detach();
  const auto order = p.argsort(1, /*descending=*/true);
  const auto broken = order[0][0].item<std::int64_t>();
  const auto uid = swarm.experts()[static_cast<std::size_t>(broken)];
  swarm.host_of(uid).set_fault(uid, Fault::kError, Fault::kNone);
  const auto output = layer->forward(input);
  for (std::int64_t row = 0; row < 5; ++row) {
    const auto best = order[row][0].item<std::int64_t>();
    const auto chosen = best == broken ? order[row][1].item<std::int64_t>() : best;
    const auto wanted = p[row][chosen] * swarm.local(swarm.experts()[static_cast<std::size_t>(chosen)], input[row]);
    CHECK(torch::allclose(output[row], wanted, 1e-9, 1e-12));
  }
}

TEST_CASE("a switch layer trains with masked cells and is saved cloned and printed", "[dmoe][switch]") {
  Swarm swarm(2, {4, 2}, 4);
  const auto options = SwitchDMoEOptions(swarm.options().cell_dropout(0.4).allow_zero_outputs(true)).jitter(0.01);
  auto layer = switch_layer(swarm, options);
  auto other = switch_layer(swarm, options);
  std::stringstream file;
  torch::save(layer, file);
  torch::load(other, file);
  auto input = random_input(9, 4).requires_grad_();
  for (int i = 0; i < 5; ++i) {
    const auto [output, loss] = layer->forward_balanced(input);
    (output.sum() + loss).backward();
    CHECK(input.grad().isfinite().all().item<bool>());
    CHECK(layer->layer->gate->projection->weight.grad().isfinite().all().item<bool>());
  }
  layer->eval();
  other->eval();
  const torch::NoGradGuard no_grad;
  CHECK(torch::equal(layer->forward(input), other->forward(input)));
  const auto copy = std::dynamic_pointer_cast<SwitchDMoEImpl>(layer->clone());
  REQUIRE(copy);
  CHECK(torch::equal(copy->forward(input), layer->forward(input)));
  CHECK(layer->forward(torch::zeros({0, 4}, torch::kDouble)).sizes() == torch::IntArrayRef({0, 4}));
  CHECK(layer->forward(random_input(6, 4).view({2, 3, 4})).sizes() == torch::IntArrayRef({2, 3, 4}));
  std::ostringstream text;
  text << *layer;
  CHECK(text.str().find("dmoe::SwitchDMoE(capacity_factor=1.25, jitter=0.01)") != std::string::npos);
}

TEST_CASE("switch settings that make no sense are refused by name", "[dmoe][switch]") {
  Swarm swarm(1, {2}, 4);
  const auto layer = swarm.options();
  CHECK_THROWS_AS(SwitchDMoE(swarm.client(), SwitchDMoEOptions(layer).capacity_factor(-1)), Exception);
  CHECK_THROWS_AS(SwitchDMoE(swarm.client(), SwitchDMoEOptions(layer).jitter(1)), Exception);
  auto narrow = layer;
  narrow.out_features(3);
  CHECK_THROWS_AS(SwitchDMoE(swarm.client(), SwitchDMoEOptions(narrow).overflow(Overflow::kPassThrough)), Exception);
}

}  // namespace
}  // namespace dmoe
