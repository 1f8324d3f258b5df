// A layer behaves like any libtorch module.
#include "tests/dmoe/swarm.hpp"

#include "tests/support/catch.hpp"

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/serialize.h>

#include <sstream>

namespace dmoe {
namespace {

using namespace std::chrono_literals;
using test::Swarm;

TEST_CASE("a layer stands in a Sequential and trains with an optimizer", "[dmoe]") {
  torch::manual_seed(static_cast<std::uint64_t>(test::seed()));
  Swarm swarm(2, {4}, 4);
  torch::nn::Sequential model(torch::nn::Linear(3, 4), swarm.layer(swarm.options()), torch::nn::Linear(4, 1));
  model->to(torch::kDouble);
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(0.05));
  const auto input = torch::randn({16, 3}, torch::kDouble);
  const auto target = input.sum(1, true);
  double first = 0;
  double last = 0;
  for (int i = 0; i < 30; ++i) {
    optimizer.zero_grad();
    const auto loss = torch::mse_loss(model->forward(input), target);
    loss.backward();
    optimizer.step();
    (i == 0 ? first : last) = loss.item<double>();
  }
  CHECK(last < first);
}

TEST_CASE("a layer is saved loaded cloned and printed", "[dmoe]") {
  Swarm swarm(2, {2, 2}, 4);
  auto layer = swarm.layer(swarm.options());
  auto other = swarm.layer(swarm.options());
  CHECK(layer->parameters().size() == 2);
  std::stringstream file;
  torch::save(layer, file);
  torch::load(other, file);
  const auto input = torch::randn({3, 4}, torch::kDouble);
  const torch::NoGradGuard no_grad;
  const auto output = layer->forward(input);
  CHECK(torch::equal(other->forward(input), output));

  const auto copy = std::dynamic_pointer_cast<DMoEImpl>(layer->clone());
  REQUIRE(copy);
  CHECK(torch::equal(copy->forward(input), output));
  CHECK(copy->stats().forwards == 1);
  CHECK(copy->gate.get() != layer->gate.get());

  std::ostringstream text;
  text << *layer;
  CHECK(text.str().find("dmoe::DMoE(in_features=4, out_features=4, grid=ffn[2, 2], k_best=4, k_min=1)") !=
        std::string::npos);
}

TEST_CASE("layers of one grid share what they know of it", "[dmoe]") {
  Swarm swarm(2, {2, 2}, 4);
  auto layer = swarm.layer(swarm.options());
  const torch::NoGradGuard no_grad;
  const auto input = torch::randn({3, 4}, torch::kDouble);
  (void)layer->forward(input);
  const auto calls = swarm.directory().calls();
  auto other = swarm.layer(swarm.options().k_best(2));
  (void)other->forward(input);
  CHECK(swarm.directory().calls() == calls);
}

TEST_CASE("layers run at the same time through futures", "[dmoe]") {
  Swarm swarm(2, {4}, 4);
  auto layer = swarm.layer(swarm.options());
  const auto input = torch::randn({3, 4}, torch::kDouble);
  const auto expected = layer->forward(input);
  std::vector<std::future<torch::Tensor>> futures;
  for (int i = 0; i < 4; ++i) futures.push_back(layer->forward_async(input));
  torch::Tensor sum = torch::zeros_like(input);
  for (auto& future : futures) sum = sum + future.get();
  CHECK(torch::allclose(sum, 4 * expected, 1e-9, 1e-12));
  sum.sum().backward();
  CHECK(layer->stats().backwards == 4);
  {
    const torch::NoGradGuard no_grad;
    CHECK_FALSE(layer->forward_async(input).get().requires_grad());
  }
  CHECK_THROWS_AS(layer->forward_async(torch::zeros({3, 9}, torch::kDouble)).get(), Exception);
}

TEST_CASE("a layer gives its balancing loss and trains with noise and masked cells", "[dmoe][c15]") {
  Swarm swarm(2, {4, 2}, 4);
  auto layer = swarm.layer(swarm.options().gate_noise(0.5).cell_dropout(0.5));
  auto input = torch::randn({12, 4}, torch::kDouble).requires_grad_();
  const auto [output, loss] = layer->forward_balanced(input);
  CHECK(output.sizes() == input.sizes());
  loss.backward({}, /*retain_graph=*/true);
  CHECK(layer->gate->projection->weight.grad().abs().max().item<double>() > 0);
  output.sum().backward();
  CHECK(layer->gate->projection->weight.grad().isfinite().all().item<bool>());
  CHECK(input.grad().isfinite().all().item<bool>());
}

TEST_CASE("settings that make no sense are refused by name", "[dmoe]") {
  Swarm swarm(1, {2}, 4);
  const auto make = [&](const DMoEOptions& options) { return DMoE(swarm.client(), options); };
  CHECK_THROWS_AS(make(DMoEOptions(4, {2}, "3x")), Exception);
  CHECK_THROWS_AS(make(DMoEOptions(0, {2}, "ffn")), Exception);
  CHECK_THROWS_AS(make(DMoEOptions(4, {2}, "ffn").k_best(0)), Exception);
  CHECK_THROWS_AS(make(DMoEOptions(4, {2}, "ffn").k_best(2).k_min(3)), Exception);
  CHECK_THROWS_AS(make(DMoEOptions(4, {2, 0}, "ffn")), Exception);
  CHECK_THROWS_AS(make(DMoEOptions(4, {}, "ffn")), Exception);
  CHECK_THROWS_AS(make(DMoEOptions(4, {2}, "ffn").forward_timeout(0ms)), Exception);
  CHECK_THROWS_AS(make(DMoEOptions(4, {2}, "ffn").backward_timeout(-5ms)), Exception);
  CHECK_THROWS_AS(DMoE(nullptr, DMoEOptions(4, {2}, "ffn")), Exception);
}

TEST_CASE("the report of the last call tells rows bytes and servers", "[dmoe]") {
  Swarm swarm(2, {4}, 4);
  auto layer = swarm.layer(swarm.options());
  layer->forward(torch::randn({3, 4}, torch::kDouble)).sum().backward();
  const auto calls = layer->last_call();
  REQUIRE(calls.size() == 8);
  for (const auto& call : calls) {
    CHECK(call.answered);
    CHECK(call.rows == 3);
    CHECK(call.bytes_received == 3 * 4 * 8);
    CHECK(call.bytes_sent == (call.backward ? 2U : 1U) * 3 * 4 * 8);
    CHECK(call.waited.count() > 0);
  }
  CHECK(calls.front().backward == false);
  CHECK(calls.back().backward == true);
}

TEST_CASE("a client lists and resolves experts", "[dmoe]") {
  Swarm swarm(2, {2, 3}, 4);
  CHECK(swarm.client()->list_experts("ffn", 2).size() == 6);
  CHECK(swarm.client()->list_experts("none", 2).empty());
  CHECK_THROWS_AS(swarm.client()->list_experts("3x", 2), Exception);
  CHECK(swarm.client()->resolve({"ffn", {1, 2}}).size() == 1);
  CHECK(swarm.client()->resolve({"ffn", {1, 9}}).empty());
}

}  // namespace
}  // namespace dmoe
