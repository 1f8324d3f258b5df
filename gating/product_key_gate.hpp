// Scores a grid of experts with one small projection.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>
#include <iosfwd>
#include <vector>

namespace dmoe::gating {

struct ProductKeyGateOptions {
  ProductKeyGateOptions(std::int64_t in_features, std::vector<std::int64_t> grid)
      : in_features_(in_features), grid_(std::move(grid)) {}

  TORCH_ARG(std::int64_t, in_features);
  /// Sizes of the expert grid, one per dimension.
  TORCH_ARG(std::vector<std::int64_t>, grid);
};

/// One linear projection in_features → Σ grid; an expert's logit is the sum of its coordinates' logits.
/// Sources: Learning@home (arXiv 2002.04013), "Structured gating function"; product keys, Lample et al. 2019.
class ProductKeyGateImpl : public torch::nn::Cloneable<ProductKeyGateImpl> {
 public:
  explicit ProductKeyGateImpl(ProductKeyGateOptions options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// @param input [B, in_features]. @return one [B, grid[d]] tensor of unnormalised logits per dimension, views of one
  /// [B, Σ grid] tensor.
  std::vector<torch::Tensor> forward(const torch::Tensor& input);

  const ProductKeyGateOptions& options() const noexcept { return options_; }

  torch::nn::Linear projection{nullptr};

 private:
  ProductKeyGateOptions options_;
};
TORCH_MODULE(ProductKeyGate);

/// The logits of chosen cells, differentiable with respect to `logits`.
/// @param logits one [B, grid[d]] tensor per dimension. @param cells [B, k, D] int64 coordinates on the same device.
/// @return [B, k]: Σ_d logits[d][row, cells[row, j, d]].
torch::Tensor cell_logits(const std::vector<torch::Tensor>& logits, const torch::Tensor& cells);

/// The log-probabilities of chosen cells under the product of the dimensions' softmaxes; shapes as cell_logits.
torch::Tensor cell_log_probabilities(const std::vector<torch::Tensor>& logits, const torch::Tensor& cells);

}  // namespace dmoe::gating
