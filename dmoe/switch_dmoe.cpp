#include "dmoe/switch_dmoe.hpp"

#include "dmoe/forward_pass.hpp"
#include "dmoe/layer_rows.hpp"
#include "dmoe/routing.hpp"

#include <torch/types.h>
#include <torch/utils.h>

#include <ostream>

namespace dmoe {
namespace {

/// Far below any logit, but finite: cells that dropout masks must not turn a row into NaN, nor its gradient.
constexpr double kMasked = -1e30;

SwitchDMoEOptions checked(SwitchDMoEOptions options) {
  const auto refuse = [](const std::string& message) { throw Exception({Errc::kInvalidArgument, message, {}}); };
  if (!(options.capacity_factor() >= 0)) refuse("SwitchDMoE: capacity_factor must be 0 (no limit) or more");
  if (!(options.jitter() >= 0 && options.jitter() < 1)) refuse("SwitchDMoE: jitter must be at least 0 and below 1");
  const auto& layer = options.layer();
  if (options.overflow() == Overflow::kPassThrough && layer.in_features() != layer.out_features()) {
    refuse("SwitchDMoE: rows can pass through only where out_features equals in_features; use Overflow::kZero");
  }
  options.layer().k_best(1).k_min(std::min<std::int64_t>(layer.k_min(), 1));
  return options;
}

}  // namespace

SwitchDMoEImpl::SwitchDMoEImpl(std::shared_ptr<Client> client, SwitchDMoEOptions options)
    : client_(std::move(client)), options_(checked(std::move(options))) {
  SwitchDMoEImpl::reset();
}

void SwitchDMoEImpl::reset() { layer = register_module("layer", DMoE(client_, options_.layer())); }

void SwitchDMoEImpl::pretty_print(std::ostream& stream) const {
  stream << "dmoe::SwitchDMoE(capacity_factor=" << options_.capacity_factor() << ", jitter=" << options_.jitter()
         << ")";
}

torch::Tensor SwitchDMoEImpl::forward(const torch::Tensor& input) { return forward_balanced(input).first; }

std::pair<torch::Tensor, torch::Tensor> SwitchDMoEImpl::forward_balanced(const torch::Tensor& input) {
  auto rows = layer->flatten(input, {});
  rows.gate_input = jittered(rows.gate_input);
  auto gate_logits = layer->gate_logits(rows);
  const auto answers = layer->call(rows, gate_logits, {options_.capacity_factor(), /*whole_grid=*/true});
  const auto& logits = gate_logits.used;
  const auto device = logits.front().device();

  const auto live = live_cells(answers.choices, logits.size()).to(device);
  torch::Tensor scores;  // [R, live experts]
  for (std::size_t d = 0; d < logits.size(); ++d) {
    const auto part = logits[d].index_select(1, live.select(1, static_cast<std::int64_t>(d)));
    scores = d == 0 ? part : scores + part;
  }
  if (live.size(0) == 0) {  // Nobody lives, and zeros are allowed.
    return {rows.shaped(answers.outputs.squeeze(1)), logits.front().sum() * 0};
  }
  scores = scores.clamp_min(kMasked);
  const auto total = scores.logsumexp(1, /*keepdim=*/true);
  const auto where = answers.answered.to(device);
  const auto own = gating::cell_logits(logits, answers.cells.to(device)).clamp_min(kMasked) - total;  // [R, 1]
  const auto weights = own.masked_fill(~where, kMasked).exp();
  const auto dtype = at::promote_types(weights.scalar_type(), answers.outputs.scalar_type());
  const auto flat = answers.outputs.flatten(2).squeeze(1).to(dtype);
  auto mixed = weights.to(flat.device(), dtype) * flat;
  if (options_.overflow() == Overflow::kPassThrough && !answers.over_capacity.empty()) {
    const auto full = torch::tensor(answers.over_capacity, torch::kInt64).to(mixed.device());
    mixed = mixed.index_copy(0, full, rows.inputs.front().flatten(1).index_select(0, full).to(dtype));
  }
  return {rows.shaped(mixed), balancing_loss(scores - total, answers.choices)};
}

torch::Tensor SwitchDMoEImpl::jittered(const torch::Tensor& input) const {
  if (!is_training() || options_.jitter() == 0) return input;
  return input * torch::empty_like(input).uniform_(1 - options_.jitter(), 1 + options_.jitter());
}

torch::Tensor SwitchDMoEImpl::balancing_loss(const torch::Tensor& log_probabilities,
                                             const gating::BeamResult& choices) const {
  const auto chosen = chosen_rows(choices);
  const auto rows = static_cast<double>(std::max<std::size_t>(choices.rows(), 1));
  std::vector<double> load;
  load.reserve(chosen.size());
  for (const auto count : chosen) load.push_back(static_cast<double>(count) / rows);
  const auto shares = torch::tensor(load, torch::kDouble).to(log_probabilities.options());
  const auto importance = log_probabilities.exp().sum(0) / rows;
  return (shares * importance).sum() * static_cast<double>(chosen.size());
}

}  // namespace dmoe
