// Scores a grid of experts with one small projection.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>
#include <iosfwd>
#include <mutex>
#include <vector>

namespace dmoe::gating {

struct ProductKeyGateOptions {
  ProductKeyGateOptions(std::int64_t in_features, std::vector<std::int64_t> grid)
      : in_features_(in_features), grid_(std::move(grid)) {}

  TORCH_ARG(std::int64_t, in_features);
  /// Sizes of the expert grid, one per dimension.
  TORCH_ARG(std::vector<std::int64_t>, grid);
  /// Standard deviation of normal noise added to every logit in training, so that experts near the top get a chance.
  TORCH_ARG(double, noise) = 0.0;
  /// Logits are divided by it: above 1 flattens the mixture.
  TORCH_ARG(double, temperature) = 1.0;
  /// Share of coordinates per dimension and row that is masked (-inf) in training; a row's best one always stays. Which
  /// experts live is not known here: in a sparse grid a row may lose all of them (DMoE sees to such rows).
  TORCH_ARG(double, cell_dropout) = 0.0;
  /// Balances the load without a loss: each coordinate has a bias that is added to its logits when experts are chosen,
  /// and nowhere else, and that moves by this much per step towards an even load. 0: no bias. 0.001 in the paper.
  /// Source: DeepSeek-V3, "auxiliary-loss-free load balancing" (arXiv 2408.15664), applied to each dimension of the
  /// grid.
  TORCH_ARG(double, balance_rate) = 0.0;
};

/// Of one dimension of a grid: per coordinate the share of choices that it got, and the one that would be even: its
/// share of the live experts, 0 where none lives. Both sum to 1, or are all 0.
struct CoordinateShares {
  std::vector<double> load;
  std::vector<double> even;
};

/// One linear projection in_features → Σ grid; an expert's logit is the sum of its coordinates' logits.
/// Sources: Learning@home (arXiv 2002.04013), "Structured gating function"; product keys, Lample et al. 2019.
class ProductKeyGateImpl : public torch::nn::Cloneable<ProductKeyGateImpl> {
 public:
  explicit ProductKeyGateImpl(ProductKeyGateOptions options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// @param input [B, in_features]. @return one [B, grid[d]] tensor of unnormalised logits per dimension. Masked cells
  /// are -inf. Without noise and dropout, and in eval mode, views of one [B, Σ grid] tensor.
  std::vector<torch::Tensor> forward(const torch::Tensor& input);

  /// `forward` in two steps, for callers who learn in between which experts live: the logits before cells are masked …
  std::vector<torch::Tensor> scores(const torch::Tensor& input);
  /// … and after; `scores` themselves where no cell dropout acts.
  std::vector<torch::Tensor> masked(const std::vector<torch::Tensor>& scores) const;
  bool masks_cells() const { return is_training() && options_.cell_dropout() > 0; }

  /// What experts are to be chosen by: `logits` (of any device, without a graph) plus the bias.
  std::vector<torch::Tensor> choice_logits(const std::vector<torch::Tensor>& logits) const;
  /// Moves the bias by balance_rate: up where the load is below the even share, down where it is above. Coordinates
  /// without a live expert stay; the mean of the others stays 0, so that no bias drifts away. Thread-safe beside
  /// choice_logits; of steps at the same moment one may be lost.
  /// @param shares one per dimension. @pre balance_rate > 0
  void rebalance(const std::vector<CoordinateShares>& shares);

  const ProductKeyGateOptions& options() const noexcept { return options_; }

  torch::nn::Linear projection{nullptr};
  torch::Tensor balance_bias;  ///< [Σ grid], a buffer; undefined without balance_rate.

 private:
  torch::Tensor present_bias() const;

  struct BiasMutex {
    BiasMutex() = default;
    BiasMutex(const BiasMutex& /*other*/) {}  // A clone has its own.
    BiasMutex& operator=(const BiasMutex& /*other*/) { return *this; }
    std::mutex mutex;
  };
  mutable BiasMutex bias_mutex_;  // Held to exchange the memory of balance_bias, which is never written to.
  ProductKeyGateOptions options_;
};
TORCH_MODULE(ProductKeyGate);

/// How evenly rows spread over a grid: values, without gradient, of one dimension.
struct GateStatistics {
  double entropy = 0;                   ///< Mean over rows of the softmax's entropy, in nats; log(size): uniform.
  double coefficient_of_variation = 0;  ///< Of the load per coordinate: standard deviation ÷ mean; 0: even.
  torch::Tensor load;                   ///< [grid[d]] share of rows whose best coordinate it is.
};

/// One per dimension. @param logits as ProductKeyGate gives them. Empty batches give zeros.
std::vector<GateStatistics> gate_statistics(const std::vector<torch::Tensor>& logits);

/// Load-balancing loss, to be added to the model's loss with a small factor (0.01): per dimension
/// size · Σ_i load_i · importance_i, where load is the share of rows whose best coordinate is i (a constant) and
/// importance the mean softmax probability (which carries the gradient); then the mean over dimensions. 1 when even.
/// Source: Switch Transformer (arXiv 2101.03961), §2.2, applied to each dimension of the grid.
torch::Tensor load_balancing_loss(const std::vector<torch::Tensor>& logits);

/// The logits of chosen cells, differentiable with respect to `logits`.
/// @param logits one [B, grid[d]] tensor per dimension. @param cells [B, k, D] int64 coordinates on the same device.
/// @return [B, k]: Σ_d logits[d][row, cells[row, j, d]].
torch::Tensor cell_logits(const std::vector<torch::Tensor>& logits, const torch::Tensor& cells);

/// The log-probabilities of chosen cells under the product of the dimensions' softmaxes; shapes as cell_logits.
torch::Tensor cell_log_probabilities(const std::vector<torch::Tensor>& logits, const torch::Tensor& cells);

}  // namespace dmoe::gating
