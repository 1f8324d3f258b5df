// What a forward pass gives, and what it sends.
#include "tests/dmoe/swarm.hpp"

#include "tests/support/catch.hpp"

namespace dmoe {
namespace {

using namespace std::chrono_literals;
using test::Fault;
using test::random_input;
using test::ranked;
using test::Swarm;

std::vector<std::vector<ExpertUid>> best_of_each(DMoE& layer, Swarm& swarm, const torch::Tensor& input, std::size_t k) {
  std::vector<std::vector<ExpertUid>> rows;
  for (std::int64_t row = 0; row < input.size(0); ++row) {
    rows.push_back(ranked(layer, input[row], swarm.experts()));
    rows.back().resize(std::min(k, rows.back().size()));
  }
  return rows;
}

TEST_CASE("forward equals the mixture of the same experts run locally", "[dmoe]") {
  Swarm swarm(3, {4, 4}, 5);
  auto layer = swarm.layer(swarm.options());
  const auto input = random_input(16, 5);
  const auto output = layer->forward(input);
  const auto expected = reference(swarm, layer, input, best_of_each(layer, swarm, input, 4));
  CHECK(output.sizes() == input.sizes());
  CHECK(torch::allclose(output, expected, 1e-9, 1e-12));
}

TEST_CASE("one forward sends one message per server and one call per expert", "[dmoe][g12]") {
  Swarm swarm(4, {4, 2}, 6);
  auto layer = swarm.layer(swarm.options());
  const auto output = layer->forward(random_input(256, 6));
  CHECK(swarm.frames() <= swarm.hosts());
  CHECK(swarm.calls() <= swarm.experts().size());
  output.sum().backward();
  CHECK(swarm.frames() <= 2 * swarm.hosts());
  CHECK(layer->stats().frames == swarm.frames());
  CHECK(layer->stats().calls == swarm.calls());
}

TEST_CASE("calls of one forward are in flight together", "[dmoe][c22]") {
  Swarm swarm(2, {8}, 3);
  for (std::size_t i = 0; i < swarm.hosts(); ++i) swarm.host(i).set_fault(Fault::kHold, Fault::kNone);
  auto layer = swarm.layer(swarm.options().k_best(8));
  std::thread releaser([&] {
    // Only when all eight wait at the same time can this go on.
    swarm.host(0).wait_for_held(4);
    swarm.host(1).wait_for_held(4);
    swarm.host(0).release_held();
    swarm.host(1).release_held();
  });
  CHECK(layer->forward(random_input(4, 3)).size(0) == 4);
  releaser.join();
}

TEST_CASE("k above the number of live experts uses those that live", "[dmoe][c2]") {
  Swarm swarm(2, {3}, 4);
  auto layer = swarm.layer(swarm.options().k_best(8));
  const auto input = random_input(5, 4);
  const auto expected = reference(swarm, layer, input, best_of_each(layer, swarm, input, 3));
  CHECK(torch::allclose(layer->forward(input), expected, 1e-9, 1e-12));
}

TEST_CASE("a grid without live experts is one error that names prefix and grid", "[dmoe][c1]") {
  Swarm swarm(1, {2, 2}, 4);
  auto layer = DMoE(swarm.client(), DMoEOptions(4, {6, 7}, "other"));
  try {
    layer->forward(torch::randn({3, 4}));
    FAIL("no error");
  } catch (const Exception& error) {
    CHECK(error.code() == Errc::kNotFound);
    CHECK(std::string(error.what()).find("'other' of 6x7") != std::string::npos);
  }
}

TEST_CASE("with zero outputs allowed a grid without experts gives zeros and counts them", "[dmoe][c1]") {
  Swarm swarm(1, {2, 2}, 4);
  auto layer = DMoE(swarm.client(), DMoEOptions(4, {6, 7}, "other").allow_zero_outputs(true));
  auto input = torch::randn({3, 4}, torch::requires_grad());
  const auto output = layer->forward(input);
  CHECK(torch::equal(output, torch::zeros({3, 4})));
  CHECK(layer->stats().rows_dropped == 3);
  output.sum().backward();
  CHECK(layer->gate->projection->weight.grad().isfinite().all().item<bool>());
}

TEST_CASE("a layer whose grid is larger than what servers host uses what there is", "[dmoe][c1]") {
  Swarm swarm(2, {3, 3}, 4);
  auto layer = DMoE(swarm.client(), swarm.options().grid({40, 50}));
  layer->to(torch::kDouble);
  const auto input = random_input(4, 4);
  const auto expected = reference(swarm, layer, input, best_of_each(layer, swarm, input, 4));
  CHECK(torch::allclose(layer->forward(input), expected, 1e-9, 1e-12));
}

TEST_CASE("inputs of more dimensions are gated per token", "[dmoe]") {
  Swarm swarm(2, {3, 2}, 4);
  auto layer = swarm.layer(swarm.options());
  const auto input = random_input(6, 4);
  const auto flat = layer->forward(input);
  const auto shaped = layer->forward(input.view({2, 3, 4}));
  CHECK(shaped.sizes() == torch::IntArrayRef({2, 3, 4}));
  CHECK(torch::equal(shaped.view({6, 4}), flat));
}

TEST_CASE("inputs of more dimensions can be gated per row with their masks", "[dmoe]") {
  Swarm swarm(2, {4}, 4);
  std::atomic<int> masked{0};
  for (const auto& uid : swarm.experts()) {
    swarm.host_of(uid).host(uid, [&masked](const test::Tensors& inputs) -> test::Tensors {
      masked += inputs.at(1).scalar_type() == torch::kBool && inputs.at(1).size(0) == inputs.at(0).size(0) ? 1 : 0;
      return {inputs[0] * inputs[1].unsqueeze(-1)};
    });
  }
  auto layer = swarm.layer(swarm.options().per_token(false));
  auto input = random_input(15, 4).view({5, 3, 4}).requires_grad_();
  const auto mask = torch::tensor({true, false, true}).expand({5, 3});
  const auto output = layer->forward_with(input, {mask});
  CHECK(torch::allclose(output, input * mask.unsqueeze(-1), 1e-9, 1e-12));
  CHECK(masked > 0);
  output.sum().backward();
  CHECK(torch::allclose(input.grad(), mask.unsqueeze(-1).expand({5, 3, 4}).to(torch::kDouble), 1e-9, 1e-12));
}

TEST_CASE("an empty batch gives an empty output and sends nothing", "[dmoe]") {
  Swarm swarm(1, {2}, 4);
  auto layer = swarm.layer(swarm.options());
  auto input = torch::empty({0, 4}, torch::kDouble).requires_grad_();
  const auto output = layer->forward(input);
  CHECK(output.sizes() == torch::IntArrayRef({0, 4}));
  output.sum().backward();
  CHECK(swarm.calls() == 0);
}

TEST_CASE("strided inputs send the numbers of their contiguous copy", "[dmoe][c10]") {
  Swarm swarm(1, {1}, 4);
  auto layer = swarm.layer(swarm.options());
  const ExpertUid uid{"ffn", {0}};
  const auto wide = random_input(6, 8);
  const std::vector<torch::Tensor> inputs{wide.slice(1, 0, 8, 2), wide.slice(1, 0, 4).slice(0, 0, 6, 3),
                                          wide.flatten().slice(0, 0, 24).view({4, 6}).t(),
                                          wide.slice(0, 0, 1).slice(1, 0, 4).expand({5, 4})};
  for (const auto& input : inputs) {
    const auto output = layer->forward(input);
    REQUIRE(swarm.host(0).last_inputs(uid).size() == 1);
    CHECK(torch::equal(swarm.host(0).last_inputs(uid)[0], input.contiguous()));
    CHECK(torch::allclose(output, swarm.local(uid, input), 1e-9, 1e-12));
  }
}

TEST_CASE("half and double inputs reach float experts as float and come back as they were", "[dmoe][c12]") {
  Swarm swarm(1, {2}, 4);
  auto layer = DMoE(swarm.client(), DMoEOptions(4, {2}, "ffn"));
  for (const auto dtype : {torch::kHalf, torch::kBFloat16, torch::kDouble, torch::kFloat}) {
    auto input = random_input(3, 4).to(dtype).requires_grad_();
    const auto output = layer->forward(input);
    CHECK(output.scalar_type() == dtype);
    CHECK(swarm.host(0).last_inputs({"ffn", {0}})[0].scalar_type() == torch::kFloat);
    output.sum().backward();
    CHECK(input.grad().scalar_type() == dtype);
  }
}

TEST_CASE("inputs that do not fit are refused before anything is sent", "[dmoe]") {
  Swarm swarm(1, {2}, 4);
  auto layer = swarm.layer(swarm.options());
  const auto code_of = [&](const torch::Tensor& input) {
    try {
      layer->forward(input);
    } catch (const Exception& error) {
      return std::optional<Errc>(error.code());
    }
    return std::optional<Errc>();
  };
  CHECK(code_of(torch::zeros({3, 5}, torch::kDouble)) == Errc::kInvalidArgument);
  CHECK(code_of(torch::zeros({4}, torch::kDouble)) == Errc::kInvalidArgument);
  CHECK(code_of(torch::zeros({3, 4}, torch::kLong)) == Errc::kInvalidArgument);
  CHECK(code_of(torch::full({3, 4}, std::nan(""), torch::kDouble)) == Errc::kInvalidArgument);
  CHECK(code_of({}) == Errc::kInvalidArgument);
  CHECK(swarm.calls() == 0);
}

}  // namespace
}  // namespace dmoe
