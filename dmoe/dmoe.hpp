// A mixture-of-experts layer whose experts live on other machines.
#pragma once

#include "dmoe/client.hpp"
#include "dmoe/stats.hpp"
#include "gating/product_key_gate.hpp"
#include "net/compression.hpp"

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <chrono>
#include <cstdint>
#include <future>
#include <iosfwd>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace dmoe {

class LayerCounters;
struct RoutingLimits;
namespace gating {
class BeamResult;
}

/// Settings of a DMoE layer: `DMoEOptions(512, {32, 32}, "ffn").k_best(4).k_min(1)`.
struct DMoEOptions {
  DMoEOptions(std::int64_t in_features, std::vector<std::int64_t> grid, std::string prefix)
      : in_features_(in_features), out_features_(in_features), grid_(std::move(grid)), prefix_(std::move(prefix)) {}

  /// Features of one row: the gate's input and what every expert takes.
  TORCH_ARG(std::int64_t, in_features);
  /// Features of an expert's output. Default: in_features. An answer of another shape counts as a failed call.
  TORCH_ARG(std::int64_t, out_features);
  /// Sizes of the expert grid, one per dimension.
  TORCH_ARG(std::vector<std::int64_t>, grid);
  /// The grid's name: "ffn" for experts ffn.0.0, ffn.0.1, …
  TORCH_ARG(std::string, prefix);
  /// Experts chosen per row.
  TORCH_ARG(std::int64_t, k_best) = 4;
  /// Rows with fewer answers are an error, or zeros with allow_zero_outputs.
  TORCH_ARG(std::int64_t, k_min) = 1;
  /// Backward waits until each row has this many answers (or all are in), then timeout_after_k_min longer.
  TORCH_ARG(std::int64_t, backward_k_min) = 1;
  /// Limit of a whole forward pass: beam search, calls, and calls to replacements.
  TORCH_ARG(std::chrono::milliseconds, forward_timeout) = std::chrono::milliseconds(5'000);
  /// Limit of a whole backward pass.
  TORCH_ARG(std::chrono::milliseconds, backward_timeout) = std::chrono::milliseconds(5'000);
  /// How long stragglers are waited for at most once every row has k_min answers.
  TORCH_ARG(std::chrono::milliseconds, timeout_after_k_min) = std::chrono::milliseconds(1'000);
  /// Then a straggler is waited for only so many times as long as its expert usually takes, or as the slowest answer of
  /// this pass took. While rows have fewer than k_min answers, a call that took longer than that and than
  /// timeout_after_k_min is given up: in forward its rows get their next best experts. 0: all of the times above.
  TORCH_ARG(double, straggler_patience) = 3.0;
  /// Rows below k_min become zeros instead of an error.
  TORCH_ARG(bool, allow_zero_outputs) = false;
  /// The floating type that experts take and give; floating inputs are converted to it and answers back.
  TORCH_ARG(torch::Dtype, expert_dtype) = torch::kFloat32;
  /// How float32 tensors travel, both ways and in backward too, to servers that read it. See Compression for the
  /// errors.
  TORCH_ARG(Compression, compression) = Compression::kNone;
  /// Of the gate, in training only; see ProductKeyGateOptions.
  TORCH_ARG(double, gate_noise) = 0.0;
  TORCH_ARG(double, gate_temperature) = 1.0;
  /// A row that it would leave fewer live experts than k_min (and than one) is spared; likewise one that lost answers.
  TORCH_ARG(double, cell_dropout) = 0.0;
  TORCH_ARG(double, gate_balance_rate) = 0.0;
  /// Extra calls, as a share of all forward calls, that rows may make to their next best expert when one takes more
  /// than twice as long as it usually does (its 95th percentile, 20 ms at least); the first answer counts. 0: none.
  /// Never in backward, where both would learn.
  TORCH_ARG(double, hedge_share) = 0.05;
  /// Whether inputs with more than two dimensions are gated per token (leading dimensions flattened into rows), or per
  /// row: dimension 0 is the row, the gate sees the mean over the dimensions between, and experts get the whole row.
  TORCH_ARG(bool, per_token) = true;
};

/// y = Σ softmax(logits of the experts that answered) · expert(x), over each row's k best live experts.
///
/// `parameters()` are the gate's: the experts' own parameters never leave their servers, which update them when
/// backward passes. A normal module otherwise: torch::save and load, train and eval, to(device), clone.
///
/// Inputs: [B, in_features] or [..., in_features], floating, any device and strides; B may be 0. Output: the same
/// with out_features. Experts compute on the CPU side of the wire; the output lies where the input was.
///
/// Forward ends when all chosen experts answered; or every row has k_min answers and timeout_after_k_min passed; or at
/// forward_timeout, which covers the search too. A call that fails before then is replaced by the row's next best
/// experts, in up to three rounds, if the row would otherwise stay below k_min. Backward goes to the experts that
/// answered; one that fails in it contributes a zero gradient. NaN or Inf in an answer is a failed call, logged with
/// the expert's UID.
///
/// With k_best = 1 the softmax over one logit is constant; the weight is then p / stop_gradient(p), where p is the
/// probability of the expert's cell under the product of per-dimension softmaxes. Its value is 1; its gradient is that
/// of log p, so the gate trains (the Switch layer's gradient, rescaled so that a large grid does not make it vanish).
///
/// Training mode records backward even when the input needs no gradient, so that experts train behind raw data. Under
/// no_grad, and in eval mode for such inputs, nothing is recorded or sent back. Double backward is refused by name.
///
/// Threads: forward and backward may run on many threads at once. Both block the calling thread, no other.
/// Copies of a payload byte in this layer: 1 going out (rows gathered into one block, from which every expert's
/// message is sent), 1 coming in (answers placed by row and rank); the same in backward.
/// @throws Exception as named at each option; kNotFound when no live expert is known: it names prefix and grid.
/// Source: Learning@home (arXiv 2002.04013), §3. Differs: a row's weights are renormalised over its answers only.
class DMoEImpl : public torch::nn::Cloneable<DMoEImpl> {
 public:
  DMoEImpl(std::shared_ptr<Client> client, DMoEOptions options);
  ~DMoEImpl() override;

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  torch::Tensor forward(const torch::Tensor& input);

  /// `extra` travels with the rows (masks, positions): each has the same dimension 0 as the flattened rows of `input`.
  torch::Tensor forward_with(const torch::Tensor& input, const std::vector<torch::Tensor>& extra);

  /// The output, and the gate's load-balancing loss for this input (a scalar with gradient), to be added to the model's
  /// loss with a small factor such as 0.01. See gating::load_balancing_loss.
  std::pair<torch::Tensor, torch::Tensor> forward_balanced(const torch::Tensor& input);

  /// `forward` on a thread of its own, so that several layers or micro-batches are in flight; grad mode is the
  /// caller's. The future gives the output, or throws what forward throws. Keep the input unchanged until then.
  /// @pre the layer is held by a shared_ptr, as module holders do.
  std::future<torch::Tensor> forward_async(torch::Tensor input);

  /// Sums over all threads since the layer was made (or cloned).
  LayerStats stats() const;
  /// The calls of this layer's latest finished forward (and of its backward, once that ran), on any thread.
  std::vector<CallReport> last_call() const;
  /// Which experts the gate chose, since the layer was made or since reset_routing.
  RoutingStats routing() const;
  void reset_routing();

  /// From now on this layer and `other` count together: stats() and last_call() of both are the same.
  void count_with(const DMoEImpl& other) { counters_ = other.counters_; }

  const DMoEOptions& options() const noexcept { return options_; }
  const std::shared_ptr<Client>& client() const noexcept { return client_; }

  gating::ProductKeyGate gate{nullptr};

 private:
  friend class SwitchDMoEImpl;
  struct Rows;
  struct Logits;
  struct Answers;
  torch::Tensor run(const Rows& rows, Logits& logits);
  Answers call(const Rows& rows, Logits& logits, const RoutingLimits& limits);
  void note_choices(const gating::BeamResult& choices, const std::vector<torch::Tensor>& logits);
  Logits gate_logits(const Rows& rows);
  Rows flatten(const torch::Tensor& input, const std::vector<torch::Tensor>& extra) const;
  static std::vector<torch::Tensor> search_logits(const std::vector<torch::Tensor>& logits, bool masked);
  torch::Tensor mix(const std::vector<torch::Tensor>& logits, const torch::Tensor& cells, const torch::Tensor& answered,
                    const torch::Tensor& outputs) const;

  std::shared_ptr<Client> client_;
  DMoEOptions options_;
  std::shared_ptr<gating::BeamSearch> search_;  // Shared with layers of the same grid.
  std::shared_ptr<LayerCounters> counters_;     // Shared with the autograd nodes of passes in flight.
};
TORCH_MODULE(DMoE);

}  // namespace dmoe
