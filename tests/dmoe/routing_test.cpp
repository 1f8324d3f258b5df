// What a layer tells about its gate, and the bias that balances without a loss.
#include "tests/dmoe/swarm.hpp"
#include "tests/support/catch.hpp"

#include <torch/serialize.h>

#include <cmath>
#include <sstream>

namespace dmoe {
namespace {

using test::random_input;
using test::ranked;
using test::Swarm;

TEST_CASE("a layer tells how often each expert was chosen and how evenly", "[dmoe][routing][c15]") {
  Swarm swarm(2, {3, 2}, 4);
  auto layer = swarm.layer(swarm.options().k_best(2));
  const auto input = random_input(10, 4);
  std::map<ExpertUid, std::uint64_t> chosen;
  double entropy = 0;
  for (std::int64_t row = 0; row < 10; ++row) {
    const auto best = ranked(layer, input[row], swarm.experts());
    for (std::size_t i = 0; i < 2; ++i) ++chosen[best[i]];
    const auto logits = layer->gate->forward(input[row].view({1, 4}));
    std::vector<double> scores;
    for (std::size_t i = 0; i < 2; ++i) {
      scores.push_back(logits[0][0][best[i].coordinates[0]].item<double>() +
                       logits[1][0][best[i].coordinates[1]].item<double>());
    }
    const double p = 1 / (1 + std::exp(scores[1] - scores[0]));
    entropy -= (p * std::log(p) + (1 - p) * std::log(1 - p)) / 10;
  }
  (void)layer->forward(input);
  (void)layer->forward(input);
  const auto routing = layer->routing();
  CHECK(routing.rows == 20);
  CHECK(routing.live_experts == 6);
  CHECK(routing.entropy == Approx(entropy).epsilon(1e-4));
  double squares = 0;
  for (const auto& [uid, count] : chosen) {
    CHECK(routing.chosen.at(uid) == 2 * count);
    CHECK(routing.share(uid) == Approx(static_cast<double>(count) / 20));
    squares += static_cast<double>(count * count);
  }
  const double mean = 20.0 / 6;
  CHECK(routing.coefficient_of_variation() == Approx(std::sqrt(squares / 6 - mean * mean) / mean));
  CHECK(routing.share({"ffn", {2, 9}}) == 0);

  layer->reset_routing();
  CHECK(layer->routing().rows == 0);
  CHECK(layer->routing().coefficient_of_variation() == 0);
}

TEST_CASE("the gate's bias evens the load without a loss and changes choices only", "[dmoe][routing][c15]") {
  Swarm swarm(2, {4, 2}, 8);
  auto layer = swarm.layer(swarm.options().k_best(2).gate_balance_rate(0.02));
  {
    const torch::NoGradGuard no_grad;
    layer->gate->projection->bias[1] += 3;
  }
  const auto input = random_input(128, 8);
  const torch::NoGradGuard no_grad;
  (void)layer->forward(input);
  CHECK(layer->routing().coefficient_of_variation() > 0.8);
  for (int step = 0; step < 300; ++step) (void)layer->forward(input);
  layer->reset_routing();
  for (int step = 0; step < 10; ++step) (void)layer->forward(input);
  CHECK(layer->routing().coefficient_of_variation() < 0.5);

  // The mixture's weights are those of the logits without the bias.
  layer->eval();
  const auto bias = layer->gate->balance_bias.to(torch::kDouble);
  const auto logits = layer->gate->forward(input);
  std::vector<std::vector<ExpertUid>> experts;
  for (std::int64_t row = 0; row < input.size(0); ++row) {
    auto best = swarm.experts();
    const auto score = [&](const ExpertUid& uid) {
      double sum = 0;
      for (std::size_t d = 0; d < 2; ++d) {
        const auto i = static_cast<std::int64_t>(uid.coordinates[d]);
        sum += logits[d][row][i].item<double>() + bias[d == 0 ? i : 4 + i].item<double>();
      }
      return sum;
    };
    std::stable_sort(best.begin(), best.end(), [&](const auto& a, const auto& b) { return score(a) > score(b); });
    best.resize(2);
    experts.push_back(best);
  }
  const auto output = layer->forward(input);
  CHECK(torch::allclose(output, reference(swarm, layer, input, experts), 1e-9, 1e-12));
  CHECK(torch::equal(layer->gate->balance_bias.to(torch::kDouble), bias));  // Not in eval mode.
}

TEST_CASE("the bias is saved and cloned with the layer and follows live experts only", "[dmoe][routing]") {
  Swarm swarm(1, {3}, 4);
  auto options = swarm.options().k_best(1).gate_balance_rate(0.1).grid({5});  // Of five coordinates three live.
  auto layer = swarm.layer(options);
  {
    const torch::NoGradGuard no_grad;
    layer->gate->projection->bias[1] += 50;  // More than the bias can make good in these steps.
  }
  const auto input = random_input(16, 4);
  for (int i = 0; i < 20; ++i) (void)layer->forward(input);
  const auto bias = layer->gate->balance_bias.clone();
  CHECK(bias[1].item<double>() < -1);
  CHECK(bias[3].item<double>() == 0);
  CHECK(bias[4].item<double>() == 0);
  CHECK(bias.sum().item<double>() == Approx(0).margin(1e-5));

  auto other = swarm.layer(options);
  std::stringstream file;
  torch::save(layer, file);
  torch::load(other, file);
  CHECK(torch::equal(other->gate->balance_bias, bias));
  const auto copy = std::dynamic_pointer_cast<DMoEImpl>(layer->clone());
  REQUIRE(copy);
  CHECK(torch::equal(copy->gate->balance_bias, bias));
  (void)copy->forward(input);
  CHECK(torch::equal(layer->gate->balance_bias, bias));  // The clone's own.
}

TEST_CASE("many threads may balance one layer", "[dmoe][routing]") {
  Swarm swarm(2, {4}, 4);
  auto layer = swarm.layer(swarm.options().gate_balance_rate(0.01));
  const auto input = random_input(8, 4);
  std::vector<std::future<torch::Tensor>> futures;
  for (int i = 0; i < 16; ++i) futures.push_back(layer->forward_async(input));
  for (auto& future : futures) CHECK(future.get().isfinite().all().item<bool>());
  CHECK(layer->gate->balance_bias.isfinite().all().item<bool>());
  CHECK(layer->routing().rows == 16 * 8);
}

}  // namespace
}  // namespace dmoe
