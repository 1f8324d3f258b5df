#include "expert_server/architectures.hpp"
#include "tests/expert_server/fixtures.hpp"
#include "tests/support/catch.hpp"

#include <torch/nn/modules/batchnorm.h>

using namespace dmoe;
using namespace dmoe::expert_server;
using namespace dmoe::expert_server::test;

namespace {

at::Tensor parameter(const ExpertSnapshot& snapshot, const std::string& name) {
  for (const auto& item : snapshot.parameters) {
    if (item.name == name) return item.tensor;
  }
  throw std::out_of_range(name);
}

at::Tensor linear(const ExpertSnapshot& weights, const std::string& name, const at::Tensor& x) {
  return torch::linear(x, parameter(weights, name + ".weight"), parameter(weights, name + ".bias"));
}

at::Tensor norm(const ExpertSnapshot& weights, const std::string& name, const at::Tensor& x) {
  const auto mean = x.mean(-1, true);
  const auto variance = (x - mean).pow(2).mean(-1, true);
  return (x - mean) / (variance + 1e-5).sqrt() * parameter(weights, name + ".weight") +
         parameter(weights, name + ".bias");
}

/// Compares backward's input gradient with finite differences of forward, for the loss sum(output * weights).
void check_input_gradient(ExpertBackend& backend, const Tensors& inputs, std::uint64_t seed) {
  const auto outputs = backend.forward(inputs, seed).value();
  const auto weights = torch::randn(outputs[0].sizes());
  const auto loss = [&](const at::Tensor& x) {
    auto moved = inputs;
    moved[0] = x;
    return (backend.forward(moved, seed).value()[0].to(at::kDouble) * weights).sum().item<double>();
  };
  std::vector<double> expected;
  constexpr double kStep = 2e-3;  // Small: a ReLU that turns on the way bends the line.
  for (std::int64_t i = 0; i < inputs[0].numel(); ++i) {
    auto step = torch::zeros({inputs[0].numel()});
    step[i] = kStep;
    step = step.view(inputs[0].sizes());
    expected.push_back((loss(inputs[0] + step) - loss(inputs[0] - step)) / (2 * kStep));
  }
  const auto gradient = backend.backward(inputs, {weights}, seed).value()[0].flatten().to(at::kDouble);
  const auto difference = (gradient - torch::tensor(expected, at::kDouble)).abs().max().item<double>();
  CHECK(difference < 0.02 * (1 + gradient.abs().max().item<double>()));
}

}  // namespace

TEST_CASE("the ffn expert computes the block of the paper", "[experts]") {
  const auto backend = builtin("ffn", 16, plain_sgd());
  const auto weights = backend->snapshot();
  const auto x = torch::randn({5, 16});
  auto inner = torch::relu(norm(weights, "first_norm", linear(weights, "first", x)));
  inner = torch::relu(norm(weights, "second_norm", linear(weights, "second", inner)));
  const auto expected = linear(weights, "third", inner) + x;
  const auto output = backend->forward({x}, 0).value();
  REQUIRE(output.size() == 1);
  CHECK(torch::allclose(output[0], expected, 1e-4, 1e-5));
}

TEST_CASE("input gradients agree with finite differences", "[experts]") {
  torch::manual_seed(3);
  check_input_gradient(*builtin("ffn", 4, plain_sgd(0.0)), {torch::randn({3, 4})}, 0);
  check_input_gradient(*builtin("transformer", 8, plain_sgd(0.0)), {torch::randn({2, 3, 8})}, 0);
  check_input_gradient(*builtin("transformer", 8, plain_sgd(0.0), 1, {{"dropout", "0.3"}}), {torch::randn({2, 3, 8})},
                       77);
}

TEST_CASE("a padded token has no influence on the others", "[experts]") {
  const auto backend = builtin("transformer", 8, plain_sgd(), 1, {{"padding_mask", "1"}});
  auto x = torch::randn({2, 4, 8});
  auto mask = torch::zeros({2, 4}, at::kBool);
  mask.select(1, 3).fill_(true);
  const auto before = backend->forward({x, mask}, 0).value()[0].narrow(1, 0, 3).clone();
  x.select(1, 3).fill_(9);
  const auto after = backend->forward({x, mask}, 0).value()[0].narrow(1, 0, 3);
  CHECK(torch::allclose(before, after, 1e-5, 1e-6));
  const auto gradients = backend->backward({x, mask}, {torch::randn({2, 4, 8})}, 0).value();
  REQUIRE(gradients.size() == 2);
  CHECK(gradients[1].numel() == 0);
}

TEST_CASE("equal seeds draw equal dropout masks", "[experts]") {
  const auto backend = builtin("transformer", 8, plain_sgd(), 1, {{"dropout", "0.5"}});
  const auto x = torch::randn({2, 3, 8});
  CHECK(same_bits(backend->forward({x}, 5).value()[0], backend->forward({x}, 5).value()[0]));
  CHECK_FALSE(same_bits(backend->forward({x}, 5).value()[0], backend->forward({x}, 6).value()[0]));
}

TEST_CASE("the same seed makes the same weights and another seed others", "[experts]") {
  const auto a = builtin("ffn", 8, plain_sgd(), 11)->snapshot();
  const auto b = builtin("ffn", 8, plain_sgd(), 11)->snapshot();
  const auto c = builtin("ffn", 8, plain_sgd(), 12)->snapshot();
  CHECK(same_bits(a.parameters, b.parameters));
  CHECK_FALSE(same_bits(a.parameters, c.parameters));
}

TEST_CASE("backward steps the weights and the counter once", "[experts]") {
  const auto backend = builtin("ffn", 8, OptimizerSettings{});
  const auto before = backend->snapshot();
  const auto x = torch::randn({4, 8});
  REQUIRE(backend->forward({x}, 0).has_value());
  CHECK(same_bits(before.parameters, backend->snapshot().parameters));
  CHECK(backend->updates() == 0);
  REQUIRE(backend->backward({x}, {torch::randn({4, 8})}, 0).has_value());
  CHECK(backend->updates() == 1);
  const auto after = backend->snapshot();
  CHECK_FALSE(same_bits(before.parameters, after.parameters));
  CHECK(after.optimizer_state.size() == 4 * after.parameters.size());
}

TEST_CASE("a19 running statistics move once per training step", "[experts]") {
  torch::nn::BatchNorm1d layer(4);
  std::vector<NamedTensor> buffers;
  for (const auto& item : layer->named_buffers()) buffers.push_back({item.key(), item.value()});
  const auto backend = backend_of(std::make_unique<FunctionExpert>(
      4, [layer](const at::Tensor& x) mutable { return layer(x); }, std::vector<NamedTensor>{}, buffers));
  const auto x = torch::randn({16, 4}) + 3;
  torch::nn::BatchNorm1d reference(4);
  reference(x);
  REQUIRE(backend->forward({x}, 0).has_value());
  CHECK(layer->num_batches_tracked.item<std::int64_t>() == 0);
  REQUIRE(backend->backward({x}, {torch::ones({16, 4})}, 0).has_value());
  CHECK(layer->num_batches_tracked.item<std::int64_t>() == 1);
  CHECK(torch::allclose(layer->running_mean, reference->running_mean));
}

TEST_CASE("a failed backward leaves statistics and weights as they were", "[experts]") {
  torch::nn::BatchNorm1d layer(4);
  std::vector<NamedTensor> buffers;
  for (const auto& item : layer->named_buffers()) buffers.push_back({item.key(), item.value()});
  const auto backend = backend_of(std::make_unique<FunctionExpert>(
      4,
      [layer](const at::Tensor& x) mutable {
        auto y = layer(x);
        if (x.requires_grad()) throw std::runtime_error("no memory");
        return y;
      },
      std::vector<NamedTensor>{}, buffers));
  const auto x = torch::randn({16, 4});
  const auto failed = backend->backward({x}, {torch::ones({16, 4})}, 0);
  REQUIRE(failed.has_error());
  CHECK(failed.error().message.find("no memory") != std::string::npos);
  CHECK(layer->num_batches_tracked.item<std::int64_t>() == 0);
  CHECK(backend->updates() == 0);
}

TEST_CASE("an unknown architecture or argument names what exists", "[experts]") {
  const auto unknown = make_expert_module("fnn", ArchitectureArguments(8, {}), 1);
  REQUIRE(unknown.has_error());
  CHECK(unknown.error().message.find("transformer") != std::string::npos);
  const auto argument = make_expert_module("transformer", ArchitectureArguments(8, {{"head", "2"}}), 1);
  REQUIRE(argument.has_error());
  CHECK(argument.error().message.find("heads") != std::string::npos);
  CHECK(make_expert_module("transformer", ArchitectureArguments(8, {{"heads", "3"}}), 1).has_error());
  CHECK(make_expert_module("transformer", ArchitectureArguments(8, {{"heads", "two"}}), 1).has_error());
  CHECK(make_expert_module("ffn", ArchitectureArguments(0, {}), 1).has_error());
}

TEST_CASE("tensors are checked against the schema by dtype and shape and rows", "[experts]") {
  const std::vector<TensorSpec> specs{{at::kFloat, {4}}, {at::kBool, {-1}, false}};
  CHECK(check_tensors({torch::zeros({3, 4}), torch::zeros({3, 9}, at::kBool)}, specs, "input").value() == 3);
  CHECK(check_tensors({torch::zeros({3, 4})}, specs, "input").has_error());
  CHECK(check_tensors({torch::zeros({3, 5}), torch::zeros({3, 9}, at::kBool)}, specs, "input").has_error());
  CHECK(
      check_tensors({torch::zeros({3, 4}, at::kDouble), torch::zeros({3, 9}, at::kBool)}, specs, "input").has_error());
  CHECK(check_tensors({torch::zeros({3, 4}), torch::zeros({2, 9}, at::kBool)}, specs, "input").has_error());
  CHECK(check_tensors({torch::scalar_tensor(1), torch::zeros({2, 9}, at::kBool)}, specs, "input").has_error());
}
