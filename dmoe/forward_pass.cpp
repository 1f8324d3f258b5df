#include "dmoe/forward_pass.hpp"

#include "dmoe/server_formats.hpp"
#include "dmoe/server_health.hpp"
#include "net/tensor_finite.hpp"

#include <torch/types.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

namespace dmoe {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint8_t kMaxReplacements =
    3;  ///< Per row: where so much fails, the time is better spent on the next step.
constexpr std::int64_t kMaxRowsPerCall = 4'096;  ///< What servers take at most by default.

std::uint64_t fresh_seed() {
  thread_local std::mt19937_64 engine{std::random_device{}()};
  return engine();
}

std::string shape_text(at::IntArrayRef sizes) {
  std::string text = "[";
  for (const auto size : sizes) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

std::string grid_text(const std::vector<std::int64_t>& grid) {
  std::string text;
  for (const auto size : grid) text += (text.empty() ? "" : "x") + std::to_string(size);
  return text;
}

/// What a person may do about a row that got too few answers.
std::string advice_for(Errc code, std::size_t dimensions) {
  switch (code) {
    case Errc::kInvalidArgument: return "; check the layer's in_features, expert_dtype and per_token";
    case Errc::kNotFound: return "; is the servers' grid one of " + std::to_string(dimensions) + " dimensions?";
    default: return "";
  }
}

std::vector<std::int64_t> shape_of(std::initializer_list<std::int64_t> first, const std::vector<std::int64_t>& rest) {
  std::vector<std::int64_t> shape(first);
  shape.insert(shape.end(), rest.begin(), rest.end());
  return shape;
}

}  // namespace

ForwardPass::ForwardPass(Client& client, gating::BeamSearch& search, const DMoEOptions& options,
                         const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& logits,
                         std::vector<std::int64_t> row_shape)
    : client_(client),
      search_(search),
      options_(options),
      inputs_(inputs),
      logits_(logits),
      row_shape_(std::move(row_shape)),
      rows_(inputs.front().size(0)),
      k_(options.k_best()),
      start_(Clock::now()),
      deadline_(start_ + options.forward_timeout()),
      seed_(fresh_seed()),
      pass_(client, {deadline_, options.timeout_after_k_min(), options.straggler_patience()}),
      quorum_(std::vector<std::int64_t>(static_cast<std::size_t>(rows_), options.k_min())),
      outputs_(at::empty(shape_of({rows_, k_}, row_shape_), inputs.front().options())),
      ranks_(static_cast<std::size_t>(rows_ * k_), Rank::kEmpty),
      row_calls_(static_cast<std::size_t>(rows_)),
      replacements_(static_cast<std::size_t>(rows_), 0),
      cells_(static_cast<std::size_t>(rows_ * k_) * options.grid().size(), 0) {}

MixtureAnswers ForwardPass::run() {
  choose_all();
  PassEvents events;
  events.on_answer = [this](std::size_t call, const auto& tensors) { return accept(call, tensors); };
  events.on_failure = [this](std::size_t call) { reject(call); };
  events.after_answers = [this] { replace_lost(); };
  pass_.run(quorum_, events);
  settle_rows();
  return collect();
}

void ForwardPass::choose_all() {
  std::vector<std::int64_t> all(static_cast<std::size_t>(rows_));
  std::iota(all.begin(), all.end(), 0);
  const auto found = search(all, static_cast<std::size_t>(k_));
  known_experts_ = found.experts();
  unanswered_lookups_ = found.unanswered();
  cut_short_ = found.cut_short();
  std::vector<Assignment> assignments;
  assignments.reserve(static_cast<std::size_t>(rows_ * k_));
  for (std::int64_t row = 0; row < rows_; ++row) {
    const auto choices = found.row(static_cast<std::size_t>(row));
    for (std::size_t rank = 0; rank < choices.size(); ++rank) {
      assignments.push_back({choices[rank].expert, row, static_cast<std::int64_t>(rank)});
    }
  }
  launch(std::move(assignments), found);
  for (std::int64_t row = 0; row < rows_; ++row) {
    if (quorum_.lost(row) && !options_.allow_zero_outputs()) fail_row(row);
  }
}

/// Rows that failures have put below k_min get their next best experts. Failures of one server come in one by one, so a
/// row may need it more than once.
void ForwardPass::replace_lost() {
  if (lost_rows_.empty()) return;
  auto rows = std::exchange(lost_rows_, {});
  std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  for (const auto row : rows) ++replacements_[static_cast<std::size_t>(row)];
  // Enough to find k new ones behind those that were tried; the banned ones are left out already.
  const auto found = search(rows, static_cast<std::size_t>(2 * k_));
  std::vector<Assignment> assignments;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto row = rows[i];
    std::int64_t rank = 0;
    for (const auto& choice : found.row(i)) {
      if (was_tried(row, found.expert(choice.expert).uid)) continue;
      while (rank < k_ && ranks_[static_cast<std::size_t>(row * k_ + rank)] != Rank::kEmpty) ++rank;
      if (rank == k_) break;
      assignments.push_back({choice.expert, row, rank++});
    }
  }
  launch(std::move(assignments), found);
  if (options_.allow_zero_outputs()) return;
  if (std::any_of(rows.begin(), rows.end(), [this](auto row) { return quorum_.lost(row); })) pass_.abandon();
}

gating::BeamResult ForwardPass::search(const std::vector<std::int64_t>& rows, std::size_t k) {
  const bool all = static_cast<std::int64_t>(rows.size()) == rows_;
  std::vector<at::Tensor> chosen;
  std::vector<const float*> pointers;
  for (const auto& logits : logits_) {
    chosen.push_back(all ? logits : logits.index_select(0, torch::tensor(rows, torch::kInt64)));
    pointers.push_back(chosen.back().data_ptr<float>());
  }
  // Calls need their share of the time, however slow the directory is.
  const auto now = Clock::now();
  return search_.search(pointers, rows.size(), k, now + (deadline_ - now) / 2);
}

bool ForwardPass::was_tried(std::int64_t row, const ExpertUid& uid) const {
  const auto& calls = row_calls_[static_cast<std::size_t>(row)];
  return std::any_of(calls.begin(), calls.end(), [&](auto call) { return pass_.batch().call(call).uid == uid; });
}

void ForwardPass::launch(std::vector<Assignment> assignments, const gating::BeamResult& found) {
  if (assignments.empty()) return;
  std::stable_sort(assignments.begin(), assignments.end(),
                   [](const auto& a, const auto& b) { return a.expert < b.expert; });
  const std::size_t dimensions = options_.grid().size();
  auto index = at::empty({static_cast<std::int64_t>(assignments.size())}, at::kLong);
  auto* index_data = index.data_ptr<std::int64_t>();
  for (std::size_t i = 0; i < assignments.size(); ++i) {
    const auto& [expert, row, rank] = assignments[i];
    index_data[i] = row;
    const auto place = static_cast<std::size_t>(row * k_ + rank);
    ranks_[place] = Rank::kPending;
    quorum_.expect(row);
    const auto& coordinates = found.expert(expert).uid.coordinates;
    std::copy(coordinates.begin(), coordinates.end(), cells_.begin() + std::ptrdiff_t(place * dimensions));
  }
  std::vector<at::Tensor> gathered;
  gathered.reserve(inputs_.size());
  for (const auto& input : inputs_) gathered.push_back(input.index_select(0, index));

  std::vector<ExpertCall> calls;
  for (std::size_t begin = 0; begin < assignments.size();) {
    std::size_t end = begin;
    auto& places = places_.emplace_back();
    while (end < assignments.size() && assignments[end].expert == assignments[begin].expert &&
           end - begin < static_cast<std::size_t>(kMaxRowsPerCall)) {
      places.push_back(assignments[end].row * k_ + assignments[end].rank);
      row_calls_[static_cast<std::size_t>(assignments[end].row)].push_back(places_.size() - 1);
      ++end;
    }
    calls.push_back(make_call(found.expert(assignments[begin].expert), gathered, static_cast<std::int64_t>(begin),
                              static_cast<std::int64_t>(end - begin)));
    begin = end;
  }
  pass_.send(std::move(calls));
}

ExpertCall ForwardPass::make_call(const gating::LiveExpert& expert, const std::vector<at::Tensor>& gathered,
                                  std::int64_t begin, std::int64_t count) const {
  ExpertCall call;
  call.uid = expert.uid;
  call.server = expert.servers.front();
  call.endpoint = client_.health().endpoint_of(*call.server);
  call.seed = seed_;
  call.compression = client_.formats().choose(call.uid, *call.server, call.endpoint, options_.compression());
  for (const auto& block : gathered) call.inputs.push_back(block.narrow(0, begin, count));
  return call;
}

/// Checks an answer and puts its rows where they belong.
Result<void> ForwardPass::accept(std::size_t call, const std::vector<at::Tensor>& tensors) {
  const auto& places = places_[call];
  const auto expected = shape_of({static_cast<std::int64_t>(places.size())}, row_shape_);
  if (tensors.empty() || tensors.front().sizes() != at::IntArrayRef(expected)) {
    return Error{
        Errc::kInternal,
        "answered with shape " + (tensors.empty() ? "nothing" : shape_text(tensors.front().sizes())) + " where " +
            shape_text(expected) +
            " was expected; has the expert been replaced by another kind, or are the layer's out_features wrong?",
        {}};
  }
  const auto answer = tensors.front().to(outputs_.scalar_type()).contiguous();
  if (!net::all_finite(answer)) return Error{Errc::kInternal, "answered with NaN or Inf", {}};
  const std::size_t row_bytes = answer.nbytes() / places.size();
  const auto* source = static_cast<const char*>(answer.data_ptr());
  auto* target = static_cast<char*>(outputs_.data_ptr());
  for (std::size_t i = 0; i < places.size(); ++i) {
    const auto place = static_cast<std::size_t>(places[i]);
    std::memcpy(target + place * row_bytes, source + i * row_bytes, row_bytes);
    ranks_[place] = Rank::kAnswered;
    quorum_.answer(places[i] / k_);
  }
  return {};
}

void ForwardPass::reject(std::size_t call) {
  for (const auto place : places_[call]) {
    const auto row = place / k_;
    ranks_[static_cast<std::size_t>(place)] = Rank::kEmpty;
    quorum_.fail(row);
    ++answers_dropped_;
    const bool may_replace = replacements_[static_cast<std::size_t>(row)] < kMaxReplacements;
    if (quorum_.lost(row) && may_replace) lost_rows_.push_back(row);
  }
}

/// Rows below k_min: an error, or nothing of them counts.
void ForwardPass::settle_rows() {
  for (std::int64_t row = 0; row < rows_; ++row) {
    if (quorum_.met(row)) continue;
    if (!options_.allow_zero_outputs()) fail_row(row);
    ++rows_dropped_;
    const auto first = ranks_.begin() + std::ptrdiff_t(row * k_);
    std::fill(first, first + std::ptrdiff_t(k_), Rank::kEmpty);
  }
}

void ForwardPass::fail_row(std::int64_t row) const {
  const auto& calls = row_calls_[static_cast<std::size_t>(row)];
  const std::string where = "row " + std::to_string(row) + " of " + std::to_string(rows_) + ", grid '" +
                            options_.prefix() + "' of " + grid_text(options_.grid());
  if (calls.empty()) {
    throw Exception({cut_short_ ? Errc::kDeadlineExceeded : Errc::kNotFound,
                     where + ": no live expert found; the directory knows " + std::to_string(known_experts_) +
                         " experts under '" + options_.prefix() + ".' (" + std::to_string(unanswered_lookups_) +
                         " prefixes unanswered). Start servers with that prefix, or check prefix and grid",
                     {}});
  }
  const std::size_t failed = static_cast<std::size_t>(
      std::count_if(calls.begin(), calls.end(), [this](auto call) { return pass_.failure(call).has_value(); }));
  // What was refused will be refused again; if any failed otherwise, another try may succeed.
  Errc code = Errc::kNotFound;
  for (const auto call : calls) {
    if (pass_.failure(call) && (code == Errc::kNotFound || code == Errc::kInvalidArgument)) {
      code = pass_.failure(call)->code;
    }
  }
  throw Exception({code,
                   where + ": " + std::to_string(quorum_.answered(row)) + " of " + std::to_string(calls.size()) +
                       " experts asked gave an answer, k_min is " + std::to_string(options_.k_min()) +
                       (failed > 0 ? ": " + pass_.describe_failures(calls) + advice_for(code, options_.grid().size())
                                   : "; the grid has " + std::to_string(known_experts_) + " live experts"),
                   {}});
}

MixtureAnswers ForwardPass::collect() {
  MixtureAnswers answers;
  answers.rows = rows_;
  answers.k = k_;
  answers.seed = seed_;
  answers.answered = at::empty({rows_, k_}, at::kBool);
  auto* answered = answers.answered.data_ptr<bool>();
  const std::size_t row_bytes = ranks_.empty() ? 0 : outputs_.nbytes() / ranks_.size();
  auto* output = static_cast<char*>(outputs_.data_ptr());
  for (std::size_t place = 0; place < ranks_.size(); ++place) {
    answered[place] = ranks_[place] == Rank::kAnswered;
    if (!answered[place]) std::memset(output + place * row_bytes, 0, row_bytes);
  }
  answers.outputs = outputs_;
  answers.cells = at::empty({rows_, k_, static_cast<std::int64_t>(options_.grid().size())}, at::kLong);
  std::copy(cells_.begin(), cells_.end(), answers.cells.data_ptr<std::int64_t>());
  for (std::size_t i = 0; i < pass_.batch().size(); ++i) {
    if (pass_.failure(i)) continue;
    const auto& call = pass_.batch().call(i);
    answers.calls.push_back({call.uid, call.server, std::move(places_[i]), call.inputs, call.compression});
  }
  return answers;
}

}  // namespace dmoe
