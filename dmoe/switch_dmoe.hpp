// A Switch layer whose experts live on other machines.
#pragma once

#include "dmoe/dmoe.hpp"

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <utility>

namespace dmoe {

/// What a row gives that its expert has no room for.
enum class Overflow : std::uint8_t {
  kZero,         ///< Zero: for a layer in a residual branch, as in the paper.
  kPassThrough,  ///< The row itself, not scaled; needs out_features = in_features.
};

/// Settings of a SwitchDMoE: `SwitchDMoEOptions(DMoEOptions(512, {32, 32}, "ffn")).capacity_factor(1.25)`.
struct SwitchDMoEOptions {
  explicit SwitchDMoEOptions(DMoEOptions layer) : layer_(std::move(layer)) {}

  /// Everything that is not said below; k_best and k_min become 1. cell_dropout is the grid dropout.
  TORCH_ARG(DMoEOptions, layer);
  /// An expert computes at most this times an even share of the batch's rows (rows ÷ live experts), rounded up; of
  /// those that chose it, the rows with the highest logits. 0: no limit.
  TORCH_ARG(double, capacity_factor) = 1.25;
  TORCH_ARG(Overflow, overflow) = Overflow::kZero;
  /// In training the gate sees its input times uniform noise from 1 - jitter to 1 + jitter; experts see the input
  /// itself.
  TORCH_ARG(double, jitter) = 0.0;
};

/// y = p(x) · expert(x), where expert is the row's best live expert and p the softmax over the logits of all live
/// experts at its place: the gate learns from the output alone, and from the balancing loss.
///
/// Where a call fails, the row's next best expert takes over within the same pass, as in DMoE; p is that expert's then.
/// In everything else a DMoE: deadlines, errors, threads, gradients. `layer->stats()` and `layer->last_call()` report
/// on calls and on rows over capacity, `layer->routing()` on utilization. Source: Switch Transformer (arXiv
/// 2101.03961). Differs: which rows are over capacity depends on their logits, not on their place in the batch; experts
/// that died take no part in p, nor in the loss.
class SwitchDMoEImpl : public torch::nn::Cloneable<SwitchDMoEImpl> {
 public:
  SwitchDMoEImpl(std::shared_ptr<Client> client, SwitchDMoEOptions options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// Shapes as DMoE's.
  torch::Tensor forward(const torch::Tensor& input);

  /// The output, and the load-balancing loss, to be added to the model's with a small factor such as 0.01:
  /// live experts · Σ_i load_i · importance_i, where load_i is the share of rows that chose expert i, those over
  /// capacity included (a constant), and importance_i the mean of its p over the rows, which carries the gradient. 1
  /// when even.
  std::pair<torch::Tensor, torch::Tensor> forward_balanced(const torch::Tensor& input);

  const SwitchDMoEOptions& options() const noexcept { return options_; }

  DMoE layer{nullptr};  ///< Its gate, calls and counters.

 private:
  torch::Tensor jittered(const torch::Tensor& input) const;
  torch::Tensor balancing_loss(const torch::Tensor& log_probabilities, const gating::BeamResult& choices) const;

  std::shared_ptr<Client> client_;
  SwitchDMoEOptions options_;
};
TORCH_MODULE(SwitchDMoE);

}  // namespace dmoe
