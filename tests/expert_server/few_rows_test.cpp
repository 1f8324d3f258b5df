// The way back of few rows: products, gradients that are never written out, and the block that uses them.
#include "expert_server/few_rows.hpp"

#include "expert_server/fresh_weights.hpp"
#include "expert_server/optimizer.hpp"
#include "expert_server/optimizer_steps.hpp"
#include "expert_server/uniform_fill.hpp"
#include "tests/expert_server/fixtures.hpp"
#include "tests/support/catch.hpp"

#include <limits>

using namespace dmoe;
using namespace dmoe::expert_server;
using namespace dmoe::expert_server::test;

namespace {

const std::vector<std::pair<std::int64_t, std::int64_t>> kShapes{{1, 1}, {7, 3}, {16, 5}, {33, 66}, {70, 130}};

OuterProducts products_of(const at::Tensor& left, const at::Tensor& right) {
  return {left.data_ptr<float>(), right.data_ptr<float>(), left.size(0), left.size(1), right.size(1)};
}

OptimizerSettings settings_of(const std::string& name) {
  OptimizerSettings settings;
  settings.kind = parse_optimizer(name).value();
  settings.learning_rate = 0.01;
  settings.epsilon = 1e-3;  // So that a step moves little where a gradient is next to nothing.
  if (name == "sgd") settings.momentum = 0.9;
  return settings;
}

struct Learned {
  Tensors answers;
  ExpertSnapshot snapshot;
  double norm;
};

Learned learn(bool own_way_back, const std::string& optimizer, std::int64_t hidden, std::int64_t rows) {
  const FewRowsMode mode(own_way_back);
  torch::manual_seed(7);
  const auto backend = builtin("ffn", hidden, settings_of(optimizer), 3);
  Learned learned{{}, {}, 0};
  for (int step = 0; step < 3; ++step) {
    const auto x = torch::randn({rows, hidden});
    const auto gradient = torch::randn({rows, hidden});
    const auto kept = gradient.clone();
    learned.answers.push_back(backend->backward({x}, {gradient}, 0).value()[0]);
    CHECK(same_bits(gradient, kept));  // A caller's bytes are never written to.
  }
  learned.snapshot = backend->snapshot();
  learned.norm = backend->last_gradient_norm();
  return learned;
}

}  // namespace

TEST_CASE("the way back of few rows equals torch for every count and width", "[few_rows]") {
  const at::NoGradGuard no_grad;
  torch::manual_seed(static_cast<std::uint64_t>(dmoe::test::seed()));
  for (std::int64_t rows = 1; rows <= kFewRows; ++rows) {
    for (const auto& [in, out] : kShapes) {
      const auto gradient = torch::randn({rows, out});
      const auto weight = torch::randn({out, in});
      const auto x = few_rows_linear_backward(gradient, weight);
      CHECK(torch::allclose(x, torch::mm(gradient, weight), 1e-4, 1e-4));
      // A row does not depend on its neighbours.
      CHECK(same_bits(x.slice(0, rows - 1, rows), few_rows_linear_backward(gradient.slice(0, rows - 1, rows), weight)));
    }
  }
}

TEST_CASE("a sum of outer products has the rows and the norm of the matrix that it stands for", "[few_rows]") {
  torch::manual_seed(static_cast<std::uint64_t>(dmoe::test::seed()));
  for (const std::int64_t rows : {1, 2, 5, 16, 32}) {
    for (const auto& [in, out] : kShapes) {
      const auto left = torch::randn({rows, out});
      const auto right = torch::randn({rows, in});
      const auto matrix = torch::mm(left.t(), right);
      auto found = torch::empty({out, in});
      for (std::int64_t row = 0; row < out; ++row) {
        outer_products_row(products_of(left, right), row, found.data_ptr<float>() + row * in);
      }
      CHECK(torch::allclose(found, matrix, 1e-4, 1e-4));
      const auto norm = norm_of(products_of(left, right));
      CHECK(std::sqrt(norm.squared) == Approx(matrix.norm().item<double>()).epsilon(1e-4));
      CHECK(norm.bound >= matrix.abs().max().item<double>() * 0.9999);
    }
  }
}

TEST_CASE("the block's own way back teaches what autograd teaches", "[few_rows]") {
  for (const std::string optimizer : {"adam", "adamw", "sgd"}) {
    for (const std::int64_t hidden : {5, 24}) {
      for (const std::int64_t rows : {1, 8, 9, 16, 17, 32, 33}) {
        const auto own = learn(true, optimizer, hidden, rows);
        const auto autograd = learn(false, optimizer, hidden, rows);
        INFO(optimizer << " h=" << hidden << " rows=" << rows);
        for (std::size_t i = 0; i < own.answers.size(); ++i) {
          CHECK(torch::allclose(own.answers[i], autograd.answers[i], 1e-3, 1e-4));
        }
        CHECK(own.norm == Approx(autograd.norm).epsilon(1e-3));
        CHECK(own.snapshot.updates == 3);
        REQUIRE(own.snapshot.parameters.size() == autograd.snapshot.parameters.size());
        for (std::size_t i = 0; i < own.snapshot.parameters.size(); ++i) {
          const auto& mine = own.snapshot.parameters[i];
          CHECK(mine.name == autograd.snapshot.parameters[i].name);
          CHECK(torch::allclose(mine.tensor, autograd.snapshot.parameters[i].tensor, 1e-3, 1e-4));
        }
        REQUIRE(own.snapshot.optimizer_state.size() == autograd.snapshot.optimizer_state.size());
      }
    }
  }
}

TEST_CASE("f2 gradients that overflow in a product change nothing", "[few_rows][f2]") {
  auto settings = plain_sgd();
  const auto backend = builtin("ffn", 8, settings, 1);
  const auto before = backend->snapshot();
  const auto huge = torch::full({2, 8}, 1e38);
  for (const auto& gradient : {huge, -huge, torch::full({2, 8}, std::numeric_limits<float>::max())}) {
    const auto refused = backend->backward({torch::randn({2, 8})}, {gradient}, 0);
    if (refused.has_error()) CHECK(refused.error().code == Errc::kInvalidArgument);
    for (const auto& item : backend->snapshot().parameters) CHECK(torch::isfinite(item.tensor).all().item<bool>());
    if (refused.has_error()) CHECK(same_bits(backend->snapshot().parameters, before.parameters));
  }
  auto weight = torch::zeros({2, 3});
  Optimizer optimizer(settings, {{"weight", weight}});
  const ParameterGradient overflowing{{}, torch::full({1, 2}, 1e30), torch::full({1, 3}, 1e30)};
  const auto refused = optimizer.step(std::vector<ParameterGradient>{overflowing});
  REQUIRE(refused.has_error());
  CHECK(refused.error().code == Errc::kInvalidArgument);
  CHECK(torch::equal(weight, torch::zeros({2, 3})));
  CHECK(optimizer.state().empty());
}

TEST_CASE("a frozen block returns gradients of few rows and never changes", "[few_rows]") {
  const auto backend = builtin("ffn", 8, {}, 1);
  const auto x = torch::randn({2, 8});
  const auto learning = builtin("ffn", 8, {}, 1)->backward({x}, {x}, 0).value()[0];
  backend->freeze();
  const auto before = backend->snapshot();
  CHECK(same_bits(backend->backward({x}, {x}, 0).value()[0], learning));
  CHECK(backend->updates() == 0);
  CHECK(same_bits(backend->snapshot().parameters, before.parameters));
}

TEST_CASE("first weights are drawn evenly and alike by any number of threads", "[experts]") {
  std::vector<float> whole(10'001);
  fill_uniform(whole.data(), 0, 10'001, 42, 0.5F);
  std::vector<float> parts(10'001);
  for (const auto& [begin, end] : std::vector<std::pair<std::int64_t, std::int64_t>>{
           {0, 1}, {1, 2}, {2, 777}, {777, 778}, {778, 5'000}, {5'000, 10'001}}) {
    fill_uniform(parts.data(), begin, end, 42, 0.5F);
  }
  CHECK(parts == whole);
  const auto drawn = torch::tensor(whole);
  CHECK(drawn.min().item<float>() >= -0.5F);
  CHECK(drawn.max().item<float>() < 0.5F);
  CHECK(std::abs(drawn.mean().item<double>()) < 0.02);
  CHECK(drawn.std().item<double>() == Approx(0.5 / std::sqrt(3.0)).epsilon(0.03));
  const FreshLinear layer(16, 4);
  CHECK(layer->weight.sizes() == at::IntArrayRef({4, 16}));
  CHECK(layer->weight.abs().max().item<float>() <= 0.25F);
  CHECK(layer->weight.std().item<double>() > 0.05);
  CHECK(layer->bias.abs().max().item<float>() <= 0.25F);
}
