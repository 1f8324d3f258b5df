// Linear layers by oneDNN: the products, and the way back through them.
#include "expert_server/linear.hpp"

#include "expert_server/matrix_product.hpp"
#include "expert_server/parallel_range.hpp"
#include "tests/expert_server/fixtures.hpp"
#include "tests/support/catch.hpp"

#include <ATen/Parallel.h>
#include <torch/autograd.h>

#include <array>
#include <atomic>

using namespace dmoe;
using namespace dmoe::expert_server;
using namespace dmoe::expert_server::test;

namespace {

/// Relative to the largest element, against the same product in double.
double error_of(const at::Tensor& product, const at::Tensor& exact) {
  const auto scale = std::max(exact.abs().max().item<double>(), 1e-30);
  return (product.to(at::kDouble) - exact).abs().max().item<double>() / scale;
}

at::Tensor exact_product(const at::Tensor& left, const at::Tensor& right) {
  return at::mm(left.to(at::kDouble), right.to(at::kDouble));
}

struct Threads {
  explicit Threads(int count) { at::set_num_threads(count); }
  ~Threads() { at::set_num_threads(before); }
  int before = at::get_num_threads();
};

}  // namespace

TEST_CASE("a product is right for every shape, and for matrices that lie transposed", "[linear]") {
  for (const std::int64_t rows : {1, 17, 64, 130, 1'100}) {
    for (const auto& [inner, columns] : {std::pair{1, 1}, {7, 33}, {64, 256}, {300, 64}}) {
      const auto left = torch::randn({rows, inner});
      const auto right = torch::randn({inner, columns});
      const auto bias = torch::randn({columns});
      const auto exact = exact_product(left, right);
      INFO(rows << " x " << inner << " x " << columns);
      CHECK(error_of(matrix_product(left, right), exact) < 1e-5);
      CHECK(error_of(matrix_product(left, right.t().contiguous().t()), exact) < 1e-5);
      CHECK(error_of(matrix_product(left.t().contiguous().t(), right), exact) < 1e-5);
      CHECK(error_of(matrix_product(left, right, bias), exact + bias) < 1e-5);
    }
  }
}

TEST_CASE("a product of what oneDNN is not asked for is torch's", "[linear]") {
  const auto left = torch::randn({20, 6}, at::kDouble);
  const auto right = torch::randn({6, 5}, at::kDouble);
  CHECK(torch::equal(matrix_product(left, right), at::mm(left, right)));
  CHECK(matrix_product(torch::randn({0, 6}), torch::randn({6, 5})).sizes() == at::IntArrayRef{0, 5});
  CHECK(matrix_product(torch::randn({4, 0}), torch::randn({0, 5}), torch::ones({5})).sum().item<float>() == 20);
  const auto gaps = torch::randn({20, 12}).slice(1, 0, 12, 2);
  const auto weight = torch::randn({6, 5});
  CHECK(error_of(matrix_product(gaps, weight), exact_product(gaps, weight)) < 1e-5);
}

TEST_CASE("every number of rows is a product of pieces for which there are kernels", "[linear]") {
  const auto weight = torch::randn({24, 320});
  const auto bias = torch::randn({24});
  const auto x = torch::randn({300, 320});
  const auto exact = exact_product(x, weight.t()) + bias;
  for (std::int64_t rows = 1; rows <= 300; ++rows) {
    INFO(rows << " rows");
    REQUIRE(error_of(matrix_product(x.narrow(0, 0, rows), weight.t(), bias), exact.narrow(0, 0, rows)) < 1e-5);
  }
}

TEST_CASE("one thread may ask for a product with another number of compute threads each time", "[linear]") {
  const auto left = torch::randn({96, 400});
  const auto right = torch::randn({120, 400}).t();
  const auto exact = exact_product(left, right);
  for (const int count : {2, 1, 2, 3}) {
    const Threads threads(count);
    CHECK(error_of(matrix_product(left, right), exact) < 1e-5);
  }
  const Threads threads(2);
  std::array<at::Tensor, 4> products;  // Of experts that are computed at once.
  parallel_range(4, 1, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = begin; i < end; ++i) products[static_cast<std::size_t>(i)] = matrix_product(left, right);
  });
  for (const auto& product : products) CHECK(error_of(product, exact) < 1e-5);
}

TEST_CASE("a layer and its way back are those of torch, whatever its rows are", "[linear]") {
  for (const std::vector<std::int64_t>& rows : {std::vector<std::int64_t>{1}, {16}, {17}, {100}, {3, 2}, {5, 9}}) {
    auto sizes = rows;
    sizes.push_back(24);
    const auto x = torch::randn(sizes).requires_grad_(true);
    const auto weight = torch::randn({40, 24}).requires_grad_(true);
    const auto bias = torch::randn({40}).requires_grad_(true);
    sizes.back() = 40;
    const auto gradient = torch::randn(sizes);
    const auto ours = apply_linear(x, weight, bias);
    const auto theirs = at::linear(x, weight, bias);
    REQUIRE(ours.sizes() == theirs.sizes());
    CHECK(error_of(ours.detach(), theirs.detach().to(at::kDouble)) < 1e-5);
    const torch::autograd::variable_list inputs{x, weight, bias};
    const auto our_gradients = torch::autograd::grad({ours}, inputs, {gradient});
    const auto their_gradients = torch::autograd::grad({theirs}, inputs, {gradient});
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      INFO("gradient " << i);
      CHECK(error_of(our_gradients[i], their_gradients[i].to(at::kDouble)) < 1e-5);
    }
  }
}

TEST_CASE("a frozen layer passes a gradient on and has none itself", "[linear]") {
  const auto x = torch::randn({32, 8}).requires_grad_(true);
  const auto weight = torch::randn({4, 8});
  const auto y = apply_linear(x, weight, torch::zeros({4}));
  y.backward(torch::ones({32, 4}));
  CHECK(error_of(x.grad(), exact_product(torch::ones({32, 4}), weight)) < 1e-5);
  CHECK_FALSE(weight.grad().defined());
}
