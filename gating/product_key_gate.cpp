#include "gating/product_key_gate.hpp"

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <numeric>
#include <ostream>

namespace dmoe::gating {

ProductKeyGateImpl::ProductKeyGateImpl(ProductKeyGateOptions options) : options_(std::move(options)) {
  TORCH_CHECK(options_.in_features() > 0, "ProductKeyGate: in_features must be above 0, not ", options_.in_features());
  TORCH_CHECK(!options_.grid().empty(), "ProductKeyGate: the grid needs at least one dimension");
  for (const auto size : options_.grid()) {
    TORCH_CHECK(size > 0, "ProductKeyGate: grid sizes must be above 0, not ", size);
  }
  reset();
}

void ProductKeyGateImpl::reset() {
  const auto& grid = options_.grid();
  const auto cells = std::accumulate(grid.begin(), grid.end(), std::int64_t{0});
  projection = register_module("projection", torch::nn::Linear(options_.in_features(), cells));
}

void ProductKeyGateImpl::pretty_print(std::ostream& stream) const {
  stream << "dmoe::gating::ProductKeyGate(in_features=" << options_.in_features() << ", grid=[";
  for (std::size_t d = 0; d < options_.grid().size(); ++d) stream << (d > 0 ? ", " : "") << options_.grid()[d];
  stream << "])";
}

std::vector<torch::Tensor> ProductKeyGateImpl::forward(const torch::Tensor& input) {
  return projection->forward(input).split_with_sizes(options_.grid(), /*dim=*/1);
}

namespace {

torch::Tensor gather_sum(const std::vector<torch::Tensor>& values, const torch::Tensor& cells) {
  TORCH_CHECK(cells.dim() == 3 && cells.size(2) == static_cast<std::int64_t>(values.size()), "cells must be [rows, k, ",
              values.size(), "], not ", cells.sizes());
  torch::Tensor sum;
  for (std::size_t d = 0; d < values.size(); ++d) {
    auto part = values[d].gather(1, cells.select(2, static_cast<std::int64_t>(d)));
    sum = d == 0 ? part : sum + part;
  }
  return sum;
}

}  // namespace

torch::Tensor cell_logits(const std::vector<torch::Tensor>& logits, const torch::Tensor& cells) {
  return gather_sum(logits, cells);
}

torch::Tensor cell_log_probabilities(const std::vector<torch::Tensor>& logits, const torch::Tensor& cells) {
  std::vector<torch::Tensor> log_probabilities;
  log_probabilities.reserve(logits.size());
  for (const auto& dimension : logits) log_probabilities.push_back(dimension.log_softmax(1));
  return gather_sum(log_probabilities, cells);
}

}  // namespace dmoe::gating
