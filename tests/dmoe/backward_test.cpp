// Gradients through a layer, against the same experts run locally and against finite differences.
#include "tests/dmoe/swarm.hpp"

#include "tests/support/catch.hpp"

#include <torch/autograd.h>

namespace dmoe {
namespace {

using namespace std::chrono_literals;
using test::Fault;
using test::random_input;
using test::ranked;
using test::Swarm;

struct Gradients {
  torch::Tensor input;
  torch::Tensor weight;
  torch::Tensor bias;
};

Gradients gradients_of(DMoE& layer, const torch::Tensor& loss, const torch::Tensor& input) {
  layer->zero_grad();
  loss.backward();
  Gradients result{input.grad().clone(), layer->gate->projection->weight.grad().clone(),
                   layer->gate->projection->bias.grad().clone()};
  input.mutable_grad() = torch::Tensor();
  return result;
}

void check_equal(const Gradients& a, const Gradients& b, double tolerance = 1e-9) {
  CHECK(torch::allclose(a.input, b.input, tolerance, tolerance * 1e-2));
  CHECK(torch::allclose(a.weight, b.weight, tolerance, tolerance * 1e-2));
  CHECK(torch::allclose(a.bias, b.bias, tolerance, tolerance * 1e-2));
}

/// A loss in which every output counts differently.
torch::Tensor loss_of(const torch::Tensor& output) {
  const auto weights = torch::arange(1, output.numel() + 1, torch::kDouble).sin().view_as(output);
  return (output * weights).sum() + output.pow(2).sum();
}

TEST_CASE("gradients equal those of the same experts run locally", "[dmoe][c17]") {
  Swarm swarm(3, {4, 4}, 5);
  auto layer = swarm.layer(swarm.options());
  auto input = random_input(12, 5).requires_grad_();
  std::vector<std::vector<ExpertUid>> experts;
  for (std::int64_t row = 0; row < 12; ++row) {
    experts.push_back(ranked(layer, input[row], swarm.experts()));
    experts.back().resize(4);
  }
  const auto remote = gradients_of(layer, loss_of(layer->forward(input)), input);
  const auto local = gradients_of(layer, loss_of(reference(swarm, layer, input, experts)), input);
  check_equal(remote, local);
}

TEST_CASE("gradients equal finite differences over the survivors of forward", "[dmoe][c17]") {
  Swarm swarm(4, {4}, 4);
  auto layer = swarm.layer(swarm.options().timeout_after_k_min(50ms));
  auto input = random_input(3, 4).requires_grad_();
  swarm.host_of({"ffn", {2}}).set_fault({"ffn", {2}}, Fault::kError, Fault::kNone);

  const auto gradients = gradients_of(layer, loss_of(layer->forward(input)), input);
  const torch::NoGradGuard no_grad;
  const double step = 1e-5;
  const auto check_finite_differences = [&](const torch::Tensor& parameter, const torch::Tensor& gradient) {
    auto flat = parameter.flatten();
    REQUIRE(flat.data_ptr() == parameter.data_ptr());
    for (std::int64_t i = 0; i < flat.numel(); ++i) {
      const double value = flat[i].item<double>();
      flat[i] = value + step;
      const double up = loss_of(layer->forward(input)).item<double>();
      flat[i] = value - step;
      const double down = loss_of(layer->forward(input)).item<double>();
      flat[i] = value;
      CHECK(gradient.flatten()[i].item<double>() == Approx((up - down) / (2 * step)).epsilon(1e-4).margin(1e-6));
    }
  };
  check_finite_differences(input, gradients.input);
  check_finite_differences(layer->gate->projection->weight, gradients.weight);
  check_finite_differences(layer->gate->projection->bias, gradients.bias);
}

TEST_CASE("one expert lost in forward and another in backward leave exact gradients of the rest", "[dmoe][c17]") {
  Swarm swarm(4, {4}, 4);
  auto layer = swarm.layer(swarm.options().timeout_after_k_min(50ms).backward_k_min(4));
  auto input = random_input(6, 4).requires_grad_();
  const ExpertUid lost{"ffn", {1}};
  const ExpertUid silent{"ffn", {3}};
  swarm.host_of(lost).set_fault(lost, Fault::kNaN, Fault::kNone);
  swarm.host_of(silent).set_fault(silent, Fault::kNone, Fault::kError);

  const std::vector<std::vector<ExpertUid>> survivors(6, {{"ffn", {0}}, {"ffn", {2}}, silent});
  const auto output = layer->forward(input);
  CHECK(torch::allclose(output, reference(swarm, layer, input, survivors), 1e-9, 1e-12));
  const auto remote = gradients_of(layer, loss_of(output), input);
  const auto local = gradients_of(layer, loss_of(reference(swarm, layer, input, survivors, {silent})), input);
  check_equal(remote, local);
  CHECK(layer->stats().failed_calls == 2);
}

TEST_CASE("experts train behind an input that needs no gradient", "[dmoe][c7]") {
  Swarm swarm(2, {4}, 4);
  auto layer = swarm.layer(swarm.options());
  layer->forward(random_input(8, 4)).sum().backward();
  for (const auto& uid : swarm.experts()) CHECK(swarm.host_of(uid).backwards(uid) == swarm.host_of(uid).forwards(uid));
  CHECK(layer->gate->projection->weight.grad().abs().sum().item<double>() > 0);
}

TEST_CASE("without grad and in eval mode nothing is sent back", "[dmoe][c8]") {
  Swarm swarm(2, {4}, 4);
  auto layer = swarm.layer(swarm.options());
  {
    const torch::NoGradGuard no_grad;
    for (int i = 0; i < 20; ++i) CHECK_FALSE(layer->forward(random_input(4, 4)).requires_grad());
  }
  (void)layer->forward(random_input(4, 4)).detach();
  layer->eval();
  layer->forward(random_input(4, 4)).sum().backward();
  for (const auto& uid : swarm.experts()) CHECK(swarm.host_of(uid).backwards(uid) == 0);
}

TEST_CASE("broadcast and strided output gradients arrive as numbers", "[dmoe][c10]") {
  Swarm swarm(1, {1}, 4);
  auto layer = swarm.layer(swarm.options());
  const ExpertUid uid{"ffn", {0}};
  auto input = random_input(4, 4).requires_grad_();

  layer->forward(input).sum().backward();
  CHECK(torch::equal(swarm.host(0).last_grads(uid)[0], torch::ones({4, 4}, torch::kDouble)));

  const auto weights = random_input(4, 4);
  (layer->forward(input).t() * weights).sum().backward();
  CHECK(torch::equal(swarm.host(0).last_grads(uid)[0], weights.t().contiguous()));

  layer->forward(input).slice(1, 0, 4, 2).sum().backward();
  CHECK(torch::equal(swarm.host(0).last_grads(uid)[0], torch::tensor({1., 0., 1., 0.}, torch::kDouble).expand({4, 4})));
}

TEST_CASE("the gate learns with a single expert per row", "[dmoe][c14]") {
  Swarm swarm(2, {3, 3}, 4);
  auto layer = swarm.layer(swarm.options().k_best(1));
  const auto input = random_input(5, 4);
  const auto output = layer->forward(input);
  for (std::int64_t row = 0; row < 5; ++row) {
    const auto best = ranked(layer, input[row], swarm.experts()).front();
    CHECK(torch::allclose(output[row], swarm.local(best, input[row]), 1e-9, 1e-12));
  }
  output.sum().backward();
  CHECK(layer->gate->projection->weight.grad().abs().max().item<double>() > 1e-3);
}

TEST_CASE("infinite gradients of a broken expert count as zero", "[dmoe][c4]") {
  Swarm swarm(2, {4}, 4);
  auto layer = swarm.layer(swarm.options());
  const ExpertUid broken{"ffn", {1}};
  swarm.host_of(broken).set_fault(broken, Fault::kNone, Fault::kNaN);
  auto input = random_input(4, 4).requires_grad_();
  const std::vector<std::vector<ExpertUid>> all(4, swarm.experts());
  const auto remote = gradients_of(layer, loss_of(layer->forward(input)), input);
  const auto local = gradients_of(layer, loss_of(reference(swarm, layer, input, all, {broken})), input);
  check_equal(remote, local);
}

TEST_CASE("a server lost between forward and backward costs its gradient only", "[dmoe][c18]") {
  Swarm swarm(2, {4}, 4);
  auto layer = swarm.layer(swarm.options());
  auto input = random_input(4, 4).requires_grad_();
  const auto output = layer->forward(input);
  swarm.host(1).kill();
  const std::vector<std::vector<ExpertUid>> all(4, swarm.experts());
  const auto remote = gradients_of(layer, loss_of(output), input);
  const auto local =
      gradients_of(layer, loss_of(reference(swarm, layer, input, all, {{"ffn", {1}}, {"ffn", {3}}})), input);
  check_equal(remote, local);
  CHECK(layer->stats().failed(Errc::kUnavailable) == 2);
}

TEST_CASE("a silent expert holds backward no longer than the grace time", "[dmoe][c18]") {
  Swarm swarm(2, {4}, 4);
  auto layer = swarm.layer(swarm.options().timeout_after_k_min(100ms));
  swarm.host(1).set_fault(Fault::kNone, Fault::kSilent);
  auto input = random_input(4, 4).requires_grad_();
  layer->forward(input).sum().backward();
  CHECK(input.grad().isfinite().all().item<bool>());
  CHECK(layer->stats().failed(Errc::kDeadlineExceeded) == 2);
}

TEST_CASE("double backward is refused by the name of the layer", "[dmoe]") {
  Swarm swarm(1, {2}, 4);
  auto layer = swarm.layer(swarm.options());
  auto input = random_input(3, 4).requires_grad_();
  const auto output = layer->forward(input);
  const auto first = torch::autograd::grad({output.sum()}, {input}, {}, true, /*create_graph=*/true);
  CHECK(first[0].isfinite().all().item<bool>());
  try {
    first[0].sum().backward();
    FAIL("no error");
  } catch (const std::exception& error) {
    CHECK(std::string(error.what()).find("double backward through DMoE") != std::string::npos);
  }
}

TEST_CASE("a second backward needs a retained graph", "[dmoe]") {
  Swarm swarm(1, {2}, 4);
  auto layer = swarm.layer(swarm.options());
  auto input = random_input(3, 4).requires_grad_();
  const auto output = layer->forward(input);
  output.sum().backward({}, /*retain_graph=*/true);
  const auto once = input.grad().clone();
  output.sum().backward();
  CHECK(torch::allclose(input.grad(), 2 * once));
  CHECK_THROWS(output.sum().backward());
}

TEST_CASE("layers in parallel branches go backward from several threads", "[dmoe][c24]") {
  Swarm swarm(2, {4, 2}, 4);
  auto left = swarm.layer(swarm.options());
  auto right = swarm.layer(swarm.options());
  const auto input = random_input(8, 4);
  std::vector<std::thread> threads;
  std::vector<torch::Tensor> gradients(4);
  for (auto& gradient : gradients) {
    threads.emplace_back([&] {
      for (int i = 0; i < 5; ++i) {
        auto x = input.clone().requires_grad_();
        const auto loss = (left->forward(x) * right->forward(x)).sum();
        gradient = torch::autograd::grad({loss}, {x})[0];
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& gradient : gradients) CHECK(torch::allclose(gradient, gradients[0], 1e-9, 1e-12));
}

}  // namespace
}  // namespace dmoe
