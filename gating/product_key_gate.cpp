#include "gating/product_key_gate.hpp"

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <ostream>

namespace dmoe::gating {

namespace {

/// A row's best coordinate is spared, so that a row never loses a whole dimension.
torch::Tensor drop_cells(const torch::Tensor& logits, double share) {
  if (logits.numel() == 0) return logits;
  const auto detached = logits.detach();
  auto dropped = torch::rand_like(detached) < share;
  dropped.scatter_(1, detached.argmax(1, /*keepdim=*/true), false);
  return logits.masked_fill(dropped, -std::numeric_limits<double>::infinity());
}

/// [size] share of rows whose best coordinate each is.
torch::Tensor load_of(const torch::Tensor& logits) {
  const auto rows = std::max<std::int64_t>(logits.size(0), 1);
  return torch::bincount(logits.detach().argmax(1), {}, logits.size(1)).to(logits.scalar_type()) /
         static_cast<double>(rows);
}

}  // namespace

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
  if (options_.balance_rate() > 0) balance_bias = register_buffer("balance_bias", torch::zeros({cells}));
}

void ProductKeyGateImpl::pretty_print(std::ostream& stream) const {
  stream << "dmoe::gating::ProductKeyGate(in_features=" << options_.in_features() << ", grid=[";
  for (std::size_t d = 0; d < options_.grid().size(); ++d) stream << (d > 0 ? ", " : "") << options_.grid()[d];
  stream << "])";
}

std::vector<torch::Tensor> ProductKeyGateImpl::forward(const torch::Tensor& input) { return masked(scores(input)); }

std::vector<torch::Tensor> ProductKeyGateImpl::scores(const torch::Tensor& input) {
  auto logits = projection->forward(input);
  if (options_.temperature() != 1.0) logits = logits / options_.temperature();
  if (is_training() && options_.noise() > 0) logits = logits + torch::randn_like(logits) * options_.noise();
  std::vector<torch::Tensor> dimensions;
  std::int64_t first = 0;
  // Not a split: libtorch 1.13's lazy backend, which stands for devices in tests, gives its parts no memory.
  for (const auto size : options_.grid()) {
    dimensions.push_back(logits.narrow(/*dim=*/1, first, size));
    first += size;
  }
  return dimensions;
}

std::vector<torch::Tensor> ProductKeyGateImpl::masked(const std::vector<torch::Tensor>& scores) const {
  if (!masks_cells()) return scores;
  std::vector<torch::Tensor> logits;
  logits.reserve(scores.size());
  for (const auto& dimension : scores) logits.push_back(drop_cells(dimension, options_.cell_dropout()));
  return logits;
}

torch::Tensor ProductKeyGateImpl::present_bias() const {
  const std::lock_guard lock(bias_mutex_.mutex);
  return balance_bias.detach();  // Of the memory as it is now.
}

std::vector<torch::Tensor> ProductKeyGateImpl::choice_logits(const std::vector<torch::Tensor>& logits) const {
  if (!balance_bias.defined()) return logits;
  const auto bias = present_bias().to(logits.front().options()).split_with_sizes(options_.grid());
  std::vector<torch::Tensor> biased;
  biased.reserve(logits.size());
  for (std::size_t d = 0; d < logits.size(); ++d) biased.push_back(logits[d] + bias[d]);
  return biased;
}

void ProductKeyGateImpl::rebalance(const std::vector<CoordinateShares>& shares) {
  const torch::NoGradGuard no_grad;
  const auto old = present_bias();
  auto bias = old.to(torch::kCPU, torch::kDouble, /*non_blocking=*/false, /*copy=*/true);
  auto* first = bias.data_ptr<double>();
  for (const auto& dimension : shares) {
    double sum = 0;
    double live = 0;
    for (std::size_t i = 0; i < dimension.even.size(); ++i) {
      if (dimension.even[i] <= 0) continue;
      const double missing = dimension.even[i] - dimension.load[i];
      first[i] += options_.balance_rate() * (missing > 0 ? 1 : missing < 0 ? -1 : 0);
      sum += first[i];
      live += 1;
    }
    for (std::size_t i = 0; i < dimension.even.size(); ++i) {
      if (dimension.even[i] > 0) first[i] -= sum / live;
    }
    first += dimension.even.size();
  }
  const auto moved = bias.to(old.options());
  const std::lock_guard lock(bias_mutex_.mutex);
  balance_bias.set_data(moved);
}

std::vector<GateStatistics> gate_statistics(const std::vector<torch::Tensor>& logits) {
  const torch::NoGradGuard no_grad;
  std::vector<GateStatistics> statistics;
  for (const auto& dimension : logits) {
    auto& one = statistics.emplace_back();
    one.load = dimension.size(0) > 0 ? load_of(dimension) : torch::zeros({dimension.size(1)}, dimension.options());
    if (dimension.size(0) == 0) continue;
    const auto p = dimension.softmax(1);
    one.entropy = -(p * (p + 1e-20).log()).sum(1).mean().item<double>();
    one.coefficient_of_variation =
        one.load.std(/*unbiased=*/false).item<double>() * static_cast<double>(one.load.numel());
  }
  return statistics;
}

torch::Tensor load_balancing_loss(const std::vector<torch::Tensor>& logits) {
  torch::Tensor loss;
  for (const auto& dimension : logits) {
    const auto rows = static_cast<double>(std::max<std::int64_t>(dimension.size(0), 1));
    const auto importance = dimension.softmax(1).sum(0) / rows;
    const auto load = dimension.size(0) > 0 ? load_of(dimension) : torch::zeros_like(importance);
    const auto part = (load * importance).sum() * static_cast<double>(dimension.size(1));
    loss = loss.defined() ? loss + part : part;
  }
  return loss / static_cast<double>(logits.size());
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
