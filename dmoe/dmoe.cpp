#include "dmoe/dmoe.hpp"

#include "dmoe/backward_pass.hpp"
#include "dmoe/forward_pass.hpp"
#include "dmoe/layer_counters.hpp"
#include "dmoe/layer_rows.hpp"
#include "dmoe/remote_node.hpp"
#include "dmoe/routing.hpp"
#include "gating/beam_search.hpp"
#include "net/tensor_finite.hpp"

#include <torch/nn/module.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <ostream>
#include <sstream>

namespace dmoe {
namespace {

/// Far below any logit, but finite: a row without answers must not turn into NaN, nor its gradient.
constexpr double kNoAnswer = -1e30;

[[noreturn]] void refuse(const std::string& message) { throw Exception({Errc::kInvalidArgument, message, {}}); }

void check(const DMoEOptions& options) {
  if (!is_grid_name(options.prefix())) {
    refuse("DMoE: '" + options.prefix() + "' is not a grid name; write letters, digits, _, ~ or -, such as ffn");
  }
  if (options.in_features() <= 0 || options.out_features() <= 0)
    refuse("DMoE: in_features and out_features must be above 0");
  if (options.k_best() <= 0) refuse("DMoE: k_best must be above 0, not " + std::to_string(options.k_best()));
  if (options.k_min() < 0 || options.k_min() > options.k_best()) {
    refuse("DMoE: k_min must lie between 0 and k_best, not " + std::to_string(options.k_min()));
  }
  if (options.grid().empty()) refuse("DMoE: the grid needs at least one dimension, such as {32, 32}");
  if (!(options.hedge_share() >= 0 && options.hedge_share() <= 1)) refuse("DMoE: hedge_share must lie between 0 and 1");
  if (options.grid().size() > kMaxGridDimensions) refuse("DMoE: a grid has at most 8 dimensions");
  for (const auto size : options.grid()) {
    if (size <= 0) refuse("DMoE: grid sizes must be above 0, not " + std::to_string(size));
  }
  if (!(options.straggler_patience() >= 0)) refuse("DMoE: straggler_patience must not be below 0");
  for (const auto limit : {options.forward_timeout(), options.backward_timeout()}) {
    if (limit.count() <= 0) refuse("DMoE: a timeout must be above 0, not " + std::to_string(limit.count()) + " ms");
  }
}

std::string sizes_text(const torch::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.sizes();
  return text.str();
}

}  // namespace

DMoEImpl::DMoEImpl(std::shared_ptr<Client> client, DMoEOptions options)
    : client_(std::move(client)), options_(std::move(options)) {
  if (!client_) refuse("DMoE: the client is null; make one with dmoe::Client::connect");
  check(options_);
  reset();
}

DMoEImpl::~DMoEImpl() = default;

void DMoEImpl::reset() {
  const auto gate_options = gating::ProductKeyGateOptions(options_.in_features(), options_.grid())
                                .noise(options_.gate_noise())
                                .temperature(options_.gate_temperature())
                                .cell_dropout(options_.cell_dropout())
                                .balance_rate(options_.gate_balance_rate());
  gate = register_module("gate", gating::ProductKeyGate(gate_options));
  const auto& grid = options_.grid();
  search_ = client_->beam_search(options_.prefix(), std::vector<std::size_t>(grid.begin(), grid.end()));
  counters_ = std::make_shared<LayerCounters>();
}

void DMoEImpl::pretty_print(std::ostream& stream) const {
  stream << "dmoe::DMoE(in_features=" << options_.in_features() << ", out_features=" << options_.out_features()
         << ", grid=" << options_.prefix() << "[";
  for (std::size_t d = 0; d < options_.grid().size(); ++d) stream << (d > 0 ? ", " : "") << options_.grid()[d];
  stream << "], k_best=" << options_.k_best() << ", k_min=" << options_.k_min();
  if (options_.compression() != Compression::kNone) stream << ", compression=" << to_string(options_.compression());
  stream << ")";
}

torch::Tensor DMoEImpl::forward(const torch::Tensor& input) { return forward_with(input, {}); }

torch::Tensor DMoEImpl::forward_with(const torch::Tensor& input, const std::vector<torch::Tensor>& extra) {
  const auto rows = flatten(input, extra);
  auto logits = gate_logits(rows);
  return run(rows, logits);
}

std::pair<torch::Tensor, torch::Tensor> DMoEImpl::forward_balanced(const torch::Tensor& input) {
  const auto rows = flatten(input, {});
  auto logits = gate_logits(rows);
  auto output = run(rows, logits);
  return {std::move(output), gating::load_balancing_loss(logits.used)};
}

std::future<torch::Tensor> DMoEImpl::forward_async(torch::Tensor input) {
  auto self = std::dynamic_pointer_cast<DMoEImpl>(shared_from_this());
  return std::async(std::launch::async, [self, input = std::move(input), with_grad = torch::GradMode::is_enabled()] {
    const torch::AutoGradMode grad_mode(with_grad);
    return self->forward(input);
  });
}

DMoEImpl::Logits DMoEImpl::gate_logits(const Rows& rows) {
  auto scores = gate->scores(rows.gate_input.to(gate->projection->weight.scalar_type()));
  if (!gate->masks_cells()) return {std::move(scores), {}};
  return {gate->masked(scores), scores};
}

torch::Tensor DMoEImpl::run(const Rows& rows, Logits& logits) {
  const auto answers = call(rows, logits, {0, is_training() && options_.gate_balance_rate() > 0});
  return rows.shaped(mix(logits.used, answers.cells, answers.answered, answers.outputs));
}

/// `logits` of rows that were spared dropout come back whole.
DMoEImpl::Answers DMoEImpl::call(const Rows& rows, Logits& logits, const RoutingLimits& limits) {
  const auto whole = search_logits(logits.whole, false);
  const auto detached = search_logits(logits.used, !whole.empty());
  const auto biased = gate->choice_logits(detached);
  const auto biased_whole = whole.empty() ? whole : gate->choice_logits(whole);

  std::vector<torch::Tensor> outputs(1);
  MixtureAnswers answers;
  Answers result;
  {
    const torch::NoGradGuard no_grad;
    ForwardPass pass(*client_, *search_, options_, rows.sent, {biased, biased_whole}, rows.row_shape, limits);
    const auto account = [&](bool returned) {
      counters_->update([&](LayerStats& stats) {
        pass.pass().add_to(stats);
        stats.forwards += returned ? 1U : 0U;
        stats.rows += static_cast<std::uint64_t>(rows.sent.front().size(0));
        stats.rows_dropped += pass.rows_dropped();
        stats.answers_dropped += pass.answers_dropped();
        stats.rows_over_capacity += answers.over_capacity.size();
        stats.hedged_calls += pass.hedged_calls();
        stats.hedges_used += pass.hedges_used();
        stats.searches_cut_short += pass.cut_short() ? 1U : 0U;
      });
      counters_->set_last_call(pass.pass().reports());
    };
    try {
      answers = pass.run();
    } catch (const Exception&) {
      account(false);
      throw;
    }
    account(true);
    result.choices = pass.choices();
    note_choices(result.choices, with_rows_of(detached, whole, answers.spared));
    outputs[0] = std::exchange(answers.outputs, {});
  }
  result.cells = answers.cells;
  result.answered = answers.answered;
  result.over_capacity = answers.over_capacity;
  logits.spare(answers.spared);
  bool wanted = is_training();
  for (const auto& tensor : rows.inputs) wanted = wanted || tensor.requires_grad();
  if (wanted && !answers.calls.empty()) {
    const BackwardLimits backward{options_.backward_k_min(), options_.backward_timeout(),
                                  options_.timeout_after_k_min(), options_.straggler_patience()};
    record_remote("DMoE", outputs, rows.inputs,
                  [client = client_, counters = counters_, backward,
                   kept = std::make_shared<const MixtureAnswers>(std::move(answers))](const auto& grad_outputs) {
                    BackwardPass pass(*client, backward, *kept, grad_outputs.front());
                    auto gradients = pass.run();
                    counters->update([&](LayerStats& stats) {
                      pass.pass().add_to(stats);
                      ++stats.backwards;
                    });
                    counters->add_to_last_call(pass.pass().reports());
                    return gradients;
                  });
  }
  result.outputs = outputs[0].to(rows.inputs.front().device());
  return result;
}

/// Statistics, and the gate's bias where it has one.
void DMoEImpl::note_choices(const gating::BeamResult& choices, const std::vector<torch::Tensor>& logits) {
  const auto chosen = chosen_rows(choices);
  counters_->add_choices(choices, chosen, summed_entropy(choices, logits));
  if (is_training() && options_.gate_balance_rate() > 0) {
    gate->rebalance(coordinate_shares(choices, chosen, options_.grid()));
  }
}

DMoEImpl::Rows DMoEImpl::flatten(const torch::Tensor& input, const std::vector<torch::Tensor>& extra) const {
  if (!input.defined() || input.dim() < 2 || input.size(-1) != options_.in_features() || !input.is_floating_point()) {
    refuse(
        "DMoE: the input must be a floating tensor [B, " + std::to_string(options_.in_features()) + "] or [..., " +
        std::to_string(options_.in_features()) + "], not " +
        (input.defined() ? sizes_text(input) + " of " + std::string(c10::toString(input.scalar_type())) : "undefined"));
  }
  Rows rows;
  rows.output_shape = input.sizes().vec();
  rows.output_shape.back() = options_.out_features();
  if (options_.per_token() || input.dim() == 2) {
    rows.inputs.push_back(input.reshape({-1, options_.in_features()}));
    rows.gate_input = rows.inputs.front();
    rows.row_shape = {options_.out_features()};
  } else {
    rows.inputs.push_back(input);
    rows.gate_input = input.flatten(1, -2).mean(1);
    rows.row_shape.assign(rows.output_shape.begin() + 1, rows.output_shape.end());
  }
  const auto count = rows.inputs.front().size(0);
  for (const auto& tensor : extra) {
    if (!tensor.defined() || tensor.dim() < 1 || tensor.size(0) != count) {
      refuse("DMoE: every extra input needs " + std::to_string(count) + " rows, like the flattened input");
    }
    rows.inputs.push_back(tensor);
  }
  for (const auto& tensor : rows.inputs) {
    const auto sendable = check_sendable(tensor);
    if (sendable.has_error()) throw Exception(sendable.error());
    const auto dtype = tensor.is_floating_point() ? options_.expert_dtype() : tensor.scalar_type();
    rows.sent.push_back(tensor.detach().to(torch::kCPU, dtype).contiguous());
  }
  return rows;
}

/// @param masked whether dropout set cells to -inf.
std::vector<torch::Tensor> DMoEImpl::search_logits(const std::vector<torch::Tensor>& logits, bool masked) {
  std::vector<torch::Tensor> result;
  for (const auto& dimension : logits) {
    result.push_back(dimension.detach().to(torch::kCPU, torch::kFloat).contiguous());
    if (masked ? result.back().isnan().any().item<bool>() : !net::all_finite(result.back())) {
      refuse("DMoE: the gate's logits are not finite; the input or the gate's parameters hold NaN or Inf");
    }
  }
  return result;
}

/// The weighted sum over each row's answers: [R, k, …] → [R, …].
torch::Tensor DMoEImpl::mix(const std::vector<torch::Tensor>& logits, const torch::Tensor& cells,
                            const torch::Tensor& answered, const torch::Tensor& outputs) const {
  const auto device = logits.front().device();
  const auto where = answered.to(device);
  torch::Tensor weights;
  if (options_.k_best() == 1) {
    const auto log_probabilities = gating::cell_log_probabilities(logits, cells.to(device));
    // Masked first: a place without an answer may name a cell that dropout has set to -inf.
    const auto own = log_probabilities.masked_fill(~where, 0);
    weights = (own - own.detach()).exp();
  } else {
    weights = gating::cell_logits(logits, cells.to(device)).masked_fill(~where, kNoAnswer).softmax(1);
  }
  weights = weights * where;
  const auto dtype = at::promote_types(weights.scalar_type(), outputs.scalar_type());
  const auto flat = outputs.flatten(2).to(dtype);
  // Not bmm: a [1, k] × [k, out] product per row costs ten times as much here, most of it waking and spinning threads.
  return (weights.to(outputs.device(), dtype).unsqueeze(2) * flat).sum(1);
}

LayerStats DMoEImpl::stats() const { return counters_->stats(); }
std::vector<CallReport> DMoEImpl::last_call() const { return counters_->last_call(); }
RoutingStats DMoEImpl::routing() const { return counters_->routing(); }
void DMoEImpl::reset_routing() { counters_->reset_routing(); }

}  // namespace dmoe
