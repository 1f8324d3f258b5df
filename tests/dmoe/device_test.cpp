// Layers and inputs on another device than the one that talks to the network: libtorch's lazy TorchScript backend,
// which computes on the CPU, but whose tensors no operator mixes with the CPU's. Where one is not moved, libtorch ends
// the program.
#include "dmoe/dmoe.hpp"
#include "dmoe/remote_expert.hpp"
#include "dmoe/remote_sequential.hpp"
#include "dmoe/switch_dmoe.hpp"
#include "expert_server/server.hpp"
#include "tests/dmoe/swarm.hpp"

#include "tests/support/catch.hpp"

#include <torch/types.h>

#include <stdexcept>
#include <string>
#include <vector>

#if __has_include(<torch/csrc/lazy/ts_backend/ts_backend_impl.h>)
#include <torch/csrc/lazy/ts_backend/ts_backend_impl.h>

namespace dmoe {
namespace {

using test::random_input;
using test::Swarm;
using test::Tensors;

torch::Device other_device() {
  static const bool ready = [] {
    torch::lazy::InitTorchScriptBackend();
    return true;
  }();
  (void)ready;
  return {torch::kLazy, 0};
}

/// A leaf with the same values.
torch::Tensor moved(const torch::Tensor& tensor) {
  return tensor.detach().to(other_device()).requires_grad_(tensor.requires_grad());
}

/// Not by Module::to, which exchanges a parameter's memory in place: this backend does not let it.
void move(gating::ProductKeyGateImpl& gate) {
  gate.projection->weight = moved(gate.projection->weight);
  gate.projection->bias = moved(gate.projection->bias);
  if (gate.balance_bias.defined()) gate.balance_bias = moved(gate.balance_bias);
}

bool is_there(const torch::Tensor& tensor) { return tensor.device() == other_device(); }

/// `there`, on the other device, has the values of `here`.
bool arrived_as(const torch::Tensor& there, const torch::Tensor& here, double tolerance = 1e-9) {
  return is_there(there) && torch::allclose(there.detach().cpu(), here.detach(), tolerance, tolerance);
}

/// Output and gradients of one step.
struct Step {
  torch::Tensor output;
  torch::Tensor input_gradient;
  torch::Tensor gate_gradient;
};

template <class Forward>
Step step(DMoEImpl& layer, torch::Tensor input, const Forward& forward) {
  layer.zero_grad();
  layer.gate->projection->weight.mutable_grad().reset();  // Which a moved one is not known to the module by.
  Step result;
  result.output = forward(input);
  result.output.pow(2).sum().backward();
  result.input_gradient = input.grad();
  result.gate_gradient = layer.gate->projection->weight.grad().clone();  // zero_grad works in place.
  return result;
}

void check_equal(const Step& there, const Step& here) {
  CHECK(arrived_as(there.output, here.output));
  CHECK(arrived_as(there.input_gradient, here.input_gradient));
  CHECK(arrived_as(there.gate_gradient, here.gate_gradient));
}

TEST_CASE("a layer on another device gives outputs and gradients there that equal the CPU's", "[dmoe][device][c6]") {
  Swarm swarm(2, {4, 2}, 4);
  for (const std::int64_t k : {1, 3}) {
    auto layer = swarm.layer(swarm.options().k_best(k));
    const auto forward = [&](const torch::Tensor& x) { return layer->forward(x); };
    const auto input = random_input(6, 4).requires_grad_();
    const auto here = step(*layer, input, forward);
    move(*layer->gate);
    check_equal(step(*layer, moved(input), forward), here);
  }
}

TEST_CASE("masks and inputs of more dimensions travel from another device", "[dmoe][device][c6][c11]") {
  Swarm swarm(1, {3}, 4);
  for (const auto& uid : swarm.experts()) {
    swarm.host(0).host(uid, [](const Tensors& inputs) -> Tensors { return {inputs[0] * inputs[1].unsqueeze(2)}; });
  }
  auto layer = swarm.layer(swarm.options().k_best(2).per_token(false));
  const auto input = random_input(10, 4).view({2, 5, 4}).detach().requires_grad_();
  const auto mask = torch::randint(0, 2, {2, 5}, torch::kInt64);
  const auto here = step(*layer, input, [&](const auto& x) { return layer->forward_with(x, {mask}); });
  move(*layer->gate);
  check_equal(step(*layer, moved(input), [&](const auto& x) { return layer->forward_with(x, {moved(mask)}); }), here);
}

TEST_CASE("strided inputs and futures work on another device", "[dmoe][device][c6][c10]") {
  Swarm swarm(1, {3}, 4);
  auto layer = swarm.layer(swarm.options().k_best(2));
  const auto forward = [&](const torch::Tensor& x) { return layer->forward_async(x.t()).get(); };
  const auto input = random_input(4, 7).requires_grad_();
  const auto here = step(*layer, input, forward);
  move(*layer->gate);
  check_equal(step(*layer, moved(input), forward), here);
  CHECK(layer->forward(moved(torch::zeros({0, 4}, torch::kDouble))).sizes() == torch::IntArrayRef({0, 4}));
  const torch::NoGradGuard no_grad;
  CHECK(arrived_as(forward(moved(input)), here.output));
}

TEST_CASE("lost answers and gradients are zero on another device", "[dmoe][device][c6][c3][c17]") {
  Swarm swarm(4, {4}, 4);
  auto layer = swarm.layer(swarm.options().k_best(4));
  const auto& uids = swarm.experts();
  const auto input = random_input(5, 4).requires_grad_();
  swarm.host_of(uids[1]).set_fault(uids[1], test::Fault::kError, test::Fault::kNone);
  swarm.host_of(uids[2]).set_fault(uids[2], test::Fault::kNone, test::Fault::kError);
  const std::vector<std::vector<ExpertUid>> survivors(5, {uids[0], uids[2], uids[3]});
  const auto here =
      step(*layer, input, [&](const auto& x) { return test::reference(swarm, layer, x, survivors, {uids[2]}); });
  move(*layer->gate);
  check_equal(step(*layer, moved(input), [&](const auto& x) { return layer->forward(x); }), here);
}

TEST_CASE("noise dropout balancing and the balancing loss work on another device", "[dmoe][device][c6][c15]") {
  Swarm swarm(1, {4}, 4);
  auto options =
      swarm.options().k_best(2).gate_noise(0.1).gate_temperature(2).cell_dropout(0.9).gate_balance_rate(0.01);
  options.grid({64});
  auto layer = swarm.layer(options);
  move(*layer->gate);
  auto input = moved(random_input(9, 4).requires_grad_());
  const auto [output, loss] = layer->forward_balanced(input);
  CHECK(is_there(output));
  CHECK(is_there(loss));
  (output.sum() + loss).backward();
  CHECK(is_there(input.grad()));
  CHECK(layer->gate->projection->weight.grad().cpu().isfinite().all().item<bool>());
  CHECK(is_there(layer->gate->balance_bias));
  CHECK(gating::gate_statistics(layer->gate->forward(input)).front().entropy > 0);
}

TEST_CASE("a switch layer on another device equals one on the CPU", "[dmoe][device][switch][c6]") {
  Swarm swarm(1, {3}, 4);
  SwitchDMoE layer(swarm.client(), SwitchDMoEOptions(swarm.options()).capacity_factor(1.0));
  layer->to(torch::kDouble);
  const auto forward = [&](const torch::Tensor& x) {
    const auto [output, loss] = layer->forward_balanced(x);
    return output + loss;
  };
  const auto input = random_input(12, 4).requires_grad_();
  const auto here = step(*layer->layer, input, forward);
  CHECK(layer->layer->stats().rows_over_capacity > 0);  // Rows pass through.
  move(*layer->layer->gate);
  check_equal(step(*layer->layer, moved(input), forward), here);
}

TEST_CASE("remote experts and pipelines take inputs from another device", "[dmoe][device][c6][c11]") {
  test::ExpertHost host(1);
  const ExpertUid uid{"pair", {0}};
  host.host(uid, [](const Tensors& inputs) -> Tensors { return {inputs[0] * inputs[1], inputs[0].pow(2)}; });
  host.describe(uid, {{4}, {4}}, {{4}, {4}}, {torch::kFloat32, torch::kInt64});
  const ExpertUid stage{"stage", {0}};
  host.host(stage, [](const Tensors& inputs) -> Tensors { return {inputs[0] * 3}; });
  host.describe(stage, {{4}}, {{4}});
  const auto directory = std::make_shared<test::MemoryDirectory>();
  for (const auto& hosted : {uid, stage}) directory->add(hosted, host.address());
  const auto client = Client::with_resolver(directory);

  const auto values = torch::randn({2, 4}).requires_grad_();
  const auto mask = torch::tensor({1, 0, 1, 0}, torch::kInt64).expand({2, 4});
  auto input = moved(values);
  RemoteExpert expert(client, "pair.0");
  const auto outputs = expert->forward_many({input, moved(mask)});
  CHECK(arrived_as(outputs[0], values * mask));
  CHECK(arrived_as(outputs[1], values.pow(2)));
  outputs[1].sum().backward();
  CHECK(arrived_as(input.grad(), 2 * values));

  RemoteSequential pipeline(client, std::vector<std::string>{"stage.0", "stage.0"});
  auto other = moved(values);
  const auto output = pipeline->forward(other);
  CHECK(arrived_as(output, values * 9, 1e-6));
  output.sum().backward();
  CHECK(arrived_as(other.grad(), torch::full({2, 4}, 9.0)));
}

TEST_CASE("compressed rows come from another device and go back there", "[dmoe][device][compression][c6][e2e]") {
  constexpr std::int64_t kFeatures = 32;
  expert_server::ServerOptions options;
  options.listen = {"127.0.0.1", 0};
  options.expert_pattern = "ffn.[0:2]";
  options.expert.hidden_dim = kFeatures;
  options.expert.learning_rate = 0.0;  // Both ask the same experts.
  options.compute_threads = 1;
  const auto server = expert_server::Server::start(std::move(options));
  if (server.has_error()) throw std::runtime_error(describe(server.error()));
  const auto client =
      Client::connect(ClientOptions().initial_peers({"127.0.0.1:" + std::to_string((*server)->port())}));
  DMoE layer(client, DMoEOptions(kFeatures, {2}, "ffn").k_best(2).compression(Compression::kInt8));
  const auto forward = [&](const torch::Tensor& x) { return layer->forward(x); };
  torch::manual_seed(test::seed());
  const auto input = torch::randn({8, kFeatures}).requires_grad_();
  do {  // Until the server has said what it reads.
    (void)layer->forward(input);
  } while (layer->last_call().front().bytes_sent == 4 * 8 * kFeatures);
  const auto here = step(*layer, input, forward);
  move(*layer->gate);
  const auto there = step(*layer, moved(input), forward);
  CHECK(arrived_as(there.output, here.output, 1e-5));
  CHECK(arrived_as(there.input_gradient, here.input_gradient, 1e-4));
  CHECK(arrived_as(there.gate_gradient, here.gate_gradient, 1e-4));
}

}  // namespace
}  // namespace dmoe
#endif
