// Few rows are learned from without autograd: the same numbers, up to rounding.
#include "expert_server/few_rows_training.hpp"
#include "expert_server/few_rows.hpp"
#include "tests/expert_server/fixtures.hpp"
#include "tests/support/catch.hpp"

#include <cmath>
#include <limits>

using namespace dmoe;
using namespace dmoe::expert_server;
using namespace dmoe::expert_server::test;

namespace {

OptimizerSettings settings_of(const std::string& name) {
  OptimizerSettings settings;
  settings.kind = parse_optimizer(name == "plain adam" ? "adam" : name).value();
  settings.amsgrad = name != "plain adam";
  settings.momentum = settings.kind == OptimizerKind::kSgd ? 0.9 : 0;
  settings.weight_decay = 0.01;
  settings.learning_rate = 0.01;
  return settings;
}

Tensors learn(ExpertBackend& expert, const at::Tensor& x, const at::Tensor& gradient, bool few) {
  const FewRowsMode mode(few);
  const auto answer = expert.backward({x}, {gradient}, 1);
  REQUIRE(answer.has_value());
  return *answer;
}

void check_near(const std::vector<NamedTensor>& a, const std::vector<NamedTensor>& b) {
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    INFO(a[i].name);
    CHECK(a[i].name == b[i].name);
    if (a[i].tensor.is_floating_point()) {
      CHECK(torch::allclose(a[i].tensor, b[i].tensor, 2e-3, 2e-5));
    } else {
      CHECK(torch::equal(a[i].tensor, b[i].tensor));
    }
  }
}

}  // namespace

TEST_CASE("learning from few rows by hand equals learning through autograd", "[few_rows]") {
  torch::manual_seed(dmoe::test::seed());
  // Widths that fill vectors and such that leave a rest; rows of one pass and of several.
  for (const std::int64_t width : {5, 16, 33}) {
    for (const std::int64_t rows : {1, 2, 7, 8, 9, 20, 32}) {
      for (const std::string optimizer : {"adam", "plain adam", "adamw", "sgd"}) {
        for (const double clip : {0.0, 0.5}) {
          INFO("width " << width << ", rows " << rows << ", " << optimizer << ", clip " << clip);
          auto settings = settings_of(optimizer);
          settings.clip_grad_norm = clip;
          const auto by_hand = builtin("ffn", width, settings, 3);
          const auto by_autograd = builtin("ffn", width, settings, 3);
          const auto x = torch::randn({rows, width});
          const auto gradient = torch::randn({rows, width});
          for (int step = 0; step < 2; ++step) {
            const auto here = learn(*by_hand, x, gradient, true);
            const auto there = learn(*by_autograd, x, gradient, false);
            CHECK(torch::allclose(here[0], there[0], 1e-3, 1e-4));
            CHECK(by_hand->last_gradient_norm() == Approx(by_autograd->last_gradient_norm()).epsilon(1e-3));
          }
          CHECK(by_hand->updates() == 2);
          // The first steps of Adam amplify rounding where a gradient is next to nothing: only the state is compared.
          const auto mine = by_hand->snapshot();
          const auto theirs = by_autograd->snapshot();
          check_near(mine.optimizer_state, theirs.optimizer_state);
          if (settings.kind == OptimizerKind::kSgd) check_near(mine.parameters, theirs.parameters);
        }
      }
    }
  }
}

TEST_CASE("the norm of a product is known without the product", "[few_rows]") {
  torch::manual_seed(dmoe::test::seed());
  const auto left = torch::randn({6, 37});
  const auto right = torch::randn({6, 21});
  const auto product = left.to(at::kDouble).t().mm(right.to(at::kDouble));
  CHECK(squared_norm(left, right) == Approx(product.pow(2).sum().item<double>()).epsilon(1e-6));

  // Rows that cancel.
  const auto twice = torch::cat({left, -left});
  CHECK(squared_norm(twice, torch::cat({right, right})) < 1e-6);

  auto broken = left.clone();
  broken[3][4] = std::numeric_limits<float>::infinity();
  CHECK_FALSE(std::isfinite(squared_norm(broken, right)));
}

TEST_CASE("weights take part in few rows as matrix products have them", "[few_rows]") {
  torch::manual_seed(dmoe::test::seed());
  for (const std::int64_t rows : {1, 3, 8, 11}) {
    for (const std::int64_t outputs : {1, 63, 64, 130}) {
      for (const std::int64_t inputs : {1, 15, 64, 77}) {
        const auto weight = torch::randn({outputs, inputs});
        const auto bias = torch::randn({outputs});
        const auto x = torch::randn({rows, inputs});
        const auto gradient = torch::randn({rows, outputs});
        CHECK(torch::allclose(few_rows_apply(x, weight, bias), x.mm(weight.t()) + bias, 1e-3, 1e-4));
        CHECK(torch::allclose(few_rows_back(gradient, weight), gradient.mm(weight), 1e-3, 1e-4));
      }
    }
  }
}

TEST_CASE("gradients that overflow on their way leave a few-rows expert as it was", "[few_rows]") {
  const auto expert = builtin("ffn", 8, settings_of("adam"), 3);
  const auto before = expert->snapshot();
  const auto x = torch::randn({2, 8});
  const auto answer = expert->backward({x}, {torch::full({2, 8}, 3e38F)}, 1);
  REQUIRE_FALSE(answer.has_value());
  CHECK(answer.error().code == Errc::kInvalidArgument);
  CHECK(expert->updates() == 0);
  CHECK(same_bits(expert->snapshot().parameters, before.parameters));
  CHECK(same_bits(expert->snapshot().optimizer_state, before.optimizer_state));
}

TEST_CASE("a frozen expert gives gradients for few rows and does not learn", "[few_rows]") {
  torch::manual_seed(dmoe::test::seed());
  const auto frozen = builtin("ffn", 8, settings_of("adam"), 3);
  const auto other = builtin("ffn", 8, settings_of("adam"), 3);
  frozen->freeze();
  const auto before = frozen->snapshot();
  const auto x = torch::randn({2, 8});
  const auto gradient = torch::randn({2, 8});
  CHECK(torch::allclose(learn(*frozen, x, gradient, true)[0], learn(*other, x, gradient, false)[0], 1e-3, 1e-4));
  CHECK(frozen->updates() == 0);
  CHECK(same_bits(frozen->snapshot().parameters, before.parameters));
}
