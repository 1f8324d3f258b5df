#include "dmoe/forward_pass.hpp"

#include "dmoe/fresh_seed.hpp"
#include "dmoe/hedge_budget.hpp"
#include "dmoe/routing.hpp"
#include "dmoe/server_formats.hpp"
#include "dmoe/server_health.hpp"
#include "dmoe/usual_times.hpp"
#include "net/tensor_finite.hpp"

#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <numeric>

namespace dmoe {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint8_t kMaxReplacements =
    3;  ///< Per row: where so much fails, the time is better spent on the next step.
/// No call is slow that waited less: it may be this machine that was busy. And only one that takes twice as long as 95
/// of 100: one in twenty is above that percentile, and an extra call beside each of those would help little.
constexpr std::chrono::milliseconds kLeastHedged{20};
constexpr std::int64_t kMaxRowsPerCall = 4'096;  ///< What servers take at most by default.

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
                         const std::vector<at::Tensor>& inputs, ChoiceLogits logits,
                         std::vector<std::int64_t> row_shape, const RoutingLimits& limits)
    : client_(client),
      search_(search),
      options_(options),
      inputs_(inputs),
      logits_(std::move(logits)),
      row_shape_(std::move(row_shape)),
      limits_(limits),
      rows_(inputs.front().size(0)),
      k_(options.k_best()),
      start_(Clock::now()),
      deadline_(start_ + options.forward_timeout()),
      seed_(fresh_seed()),
      pass_(client, {deadline_, options.timeout_after_k_min(), options.straggler_patience()}),
      quorum_(std::vector<std::int64_t>(static_cast<std::size_t>(rows_), options.k_min())),
      outputs_(at::empty(shape_of({rows_, k_}, row_shape_), inputs.front().options())),
      ranks_(static_cast<std::size_t>(rows_ * k_)),
      row_calls_(static_cast<std::size_t>(rows_)),
      replacements_(static_cast<std::size_t>(rows_), 0),
      cells_(static_cast<std::size_t>(rows_ * k_) * options.grid().size(), 0) {}

MixtureAnswers ForwardPass::run() {
  choose_all();
  PassEvents events;
  events.on_answer = [this](std::size_t call, const auto& tensors) { return accept(call, tensors); };
  events.on_failure = [this](std::size_t call) { reject(call); };
  events.after_answers = [this] { replace_lost(); };
  events.settled = [this] { return open_places_ == 0; };
  if (options_.hedge_share() > 0) {
    events.next_alarm = [this] { return next_hedge(); };
    events.on_alarm = [this] { hedge_slow(); };
  }
  pass_.run(quorum_, events);
  settle_rows();
  return collect();
}

void ForwardPass::choose_all() {
  std::vector<std::int64_t> all(static_cast<std::size_t>(rows_));
  std::iota(all.begin(), all.end(), 0);
  if (limits_.whole_grid) search_.look_everywhere(start_ + (deadline_ - start_) / 4);
  choices_ = search(all, static_cast<std::size_t>(k_));
  if (const auto rows = rows_short_of_experts(); !rows.empty()) {
    spare(rows);
    choices_ = search(all, static_cast<std::size_t>(k_));
  }
  const auto& found = *choices_;
  known_experts_ = found.experts();
  unanswered_lookups_ = found.unanswered();
  cut_short_ = found.cut_short();
  excuse_over_capacity();
  std::vector<Assignment> assignments;
  assignments.reserve(static_cast<std::size_t>(rows_ * k_));
  auto excused = over_capacity_.begin();
  for (std::int64_t row = 0; row < rows_; ++row) {
    if (excused != over_capacity_.end() && *excused == row) {
      ++excused;
      continue;
    }
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

/// Because dropout masked the cells of those that live.
std::vector<std::int64_t> ForwardPass::rows_short_of_experts() const {
  std::vector<std::int64_t> rows;
  if (logits_.whole.empty()) return rows;
  const auto needed = static_cast<std::size_t>(std::max<std::int64_t>(options_.k_min(), 1));
  for (std::int64_t row = 0; row < rows_; ++row) {
    if (choices_->row(static_cast<std::size_t>(row)).size() < needed) rows.push_back(row);
  }
  return rows;
}

/// Dropout is there to spread rows over experts, never to leave one without: such a row gets all its cells back.
void ForwardPass::spare(const std::vector<std::int64_t>& rows) {
  if (logits_.whole.empty()) return;
  logits_.used = with_rows_of(std::move(logits_.used), logits_.whole, rows);
  const auto old = static_cast<std::ptrdiff_t>(spared_.size());
  std::copy_if(rows.begin(), rows.end(), std::back_inserter(spared_), [&](auto row) {
    return std::find(spared_.begin(), spared_.begin() + old, row) == spared_.begin() + old;
  });
}

/// Those that rank lowest with the expert they chose first, wherever they stand in the batch.
void ForwardPass::excuse_over_capacity() {
  if (limits_.capacity_factor <= 0 || known_experts_ == 0) return;
  const double share = static_cast<double>(rows_) / static_cast<double>(known_experts_);
  const auto capacity = std::max<std::size_t>(1, static_cast<std::size_t>(std::ceil(share * limits_.capacity_factor)));
  std::vector<std::vector<std::pair<float, std::int64_t>>> wanted(known_experts_);  // Score and -row: earlier rows win.
  for (std::int64_t row = 0; row < rows_; ++row) {
    const auto choices = choices_->row(static_cast<std::size_t>(row));
    if (!choices.empty()) wanted[choices.front().expert].emplace_back(choices.front().score, -row);
  }
  for (auto& rows : wanted) {
    if (rows.size() <= capacity) continue;
    std::sort(rows.begin(), rows.end(), std::greater<>());
    for (std::size_t i = capacity; i < rows.size(); ++i) over_capacity_.push_back(-rows[i].second);
  }
  std::sort(over_capacity_.begin(), over_capacity_.end());
  for (const auto row : over_capacity_) quorum_.excuse(row);
}

/// Rows that failures have put below k_min get their next best experts. Failures of one server come in one by one, so a
/// row may need it more than once.
void ForwardPass::replace_lost() {
  if (lost_rows_.empty()) return;
  auto rows = std::exchange(lost_rows_, {});
  std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  for (const auto row : rows) ++replacements_[static_cast<std::size_t>(row)];
  spare(rows);
  // Enough to find k new ones behind those that were tried; the banned ones are left out already.
  const auto found = search(rows, static_cast<std::size_t>(2 * k_));
  std::vector<Assignment> assignments;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto row = rows[i];
    std::int64_t rank = 0;
    for (const auto& choice : found.row(i)) {
      if (was_tried(row, found.expert(choice.expert).uid)) continue;
      while (rank < k_ && !at(row * k_ + rank).free()) ++rank;
      if (rank == k_) break;
      assignments.push_back({choice.expert, row, rank++});
    }
  }
  launch(std::move(assignments), found);
  if (options_.allow_zero_outputs()) return;
  if (std::any_of(rows.begin(), rows.end(), [this](auto row) { return quorum_.lost(row); })) pass_.abandon();
}

CallBatch::TimePoint ForwardPass::next_hedge() const {
  auto next = CallBatch::TimePoint::max();
  for (std::size_t call = 0; call < hedge_at_.size(); ++call) {
    if (pass_.batch().is_outstanding(call)) next = std::min(next, hedge_at_[call]);
  }
  return next;
}

/// The rows of slow calls go to their next best experts as well; the answer that comes first counts. Forward only: an
/// expert that computes in vain has learned nothing.
void ForwardPass::hedge_slow() {
  const auto now = Clock::now();
  std::vector<std::size_t> slow;
  std::vector<std::int64_t> rows;
  for (std::size_t call = 0; call < hedge_at_.size(); ++call) {
    if (!pass_.batch().is_outstanding(call) || hedge_at_[call] > now) continue;
    hedge_at_[call] = CallBatch::TimePoint::max();
    slow.push_back(call);
    for (const auto place : places_[call]) rows.push_back(place / k_);
  }
  std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  if (rows.empty()) return;
  const auto found = search(rows, static_cast<std::size_t>(2 * k_));
  auto assignments = hedges_for(slow, found, rows);
  std::map<std::uint32_t, std::size_t> experts;  // With their rows: those that help most are paid for first.
  for (const auto& assignment : assignments) ++experts[assignment.expert];
  std::vector<std::pair<std::size_t, std::uint32_t>> order;
  for (const auto& [expert, count] : experts) order.emplace_back(count, expert);
  std::sort(order.begin(), order.end(), std::greater<>());
  const auto granted = client_.hedge_budget().spend(order.size());
  for (std::size_t i = granted; i < order.size(); ++i) experts.erase(order[i].second);
  std::erase_if(assignments, [&](const auto& assignment) { return experts.count(assignment.expert) == 0; });
  hedged_calls_ += granted;
  launch(std::move(assignments), found, true);
}

std::vector<ForwardPass::Assignment> ForwardPass::hedges_for(const std::vector<std::size_t>& slow,
                                                             const gating::BeamResult& found,
                                                             const std::vector<std::int64_t>& rows) const {
  std::vector<Assignment> assignments;
  std::vector<std::size_t> used(rows.size(), 0);  // A row may wait for several slow calls: each has its own hedge.
  for (const auto call : slow) {
    for (const auto place : places_[call]) {
      if (at(place).answered() || at(place).pending != 1) continue;
      const auto row = place / k_;
      const auto i = static_cast<std::size_t>(std::lower_bound(rows.begin(), rows.end(), row) - rows.begin());
      const auto choices = found.row(i);
      while (used[i] < choices.size() && was_tried(row, found.expert(choices[used[i]].expert).uid)) ++used[i];
      if (used[i] < choices.size()) assignments.push_back({choices[used[i]++].expert, row, place % k_});
    }
  }
  return assignments;
}

gating::BeamResult ForwardPass::search(const std::vector<std::int64_t>& rows, std::size_t k) {
  const bool all = static_cast<std::int64_t>(rows.size()) == rows_;
  std::vector<at::Tensor> chosen;
  std::vector<const float*> pointers;
  for (const auto& logits : logits_.used) {
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

void ForwardPass::set_cell(std::size_t place, const ExpertUid& uid) {
  const auto first = cells_.begin() + static_cast<std::ptrdiff_t>(place * options_.grid().size());
  std::copy(uid.coordinates.begin(), uid.coordinates.end(), first);
}

void ForwardPass::launch(std::vector<Assignment> assignments, const gating::BeamResult& found, bool hedge) {
  if (assignments.empty()) return;
  std::stable_sort(assignments.begin(), assignments.end(),
                   [](const auto& a, const auto& b) { return a.expert < b.expert; });
  auto index = at::empty({static_cast<std::int64_t>(assignments.size())}, at::kLong);
  auto* index_data = index.data_ptr<std::int64_t>();
  for (std::size_t i = 0; i < assignments.size(); ++i) {
    const auto& [expert, row, rank] = assignments[i];
    index_data[i] = row;
    auto& place = at(row * k_ + rank);
    if (place.pending++ == 0) ++open_places_;
    quorum_.expect(row);
    if (!hedge) set_cell(static_cast<std::size_t>(row * k_ + rank), found.expert(expert).uid);
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
    calls.back().hedge = hedge;
    begin = end;
  }
  const auto first = hedge_at_.size();
  pass_.send(std::move(calls));
  hedge_at_.resize(places_.size(), CallBatch::TimePoint::max());
  if (hedge || options_.hedge_share() <= 0) return;
  client_.hedge_budget().earn(places_.size() - first, options_.hedge_share());
  const auto& batch = pass_.batch();
  for (auto call = first; call < places_.size(); ++call) {
    const auto time = client_.usual_times(/*backward=*/false).at_most(batch.call(call).uid);
    if (time) hedge_at_[call] = batch.sent(call) + std::max<std::chrono::nanoseconds>(2 * *time, kLeastHedged);
  }
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
    auto& place = at(places[i]);
    const auto row = places[i] / k_;
    --place.pending;
    if (place.answered()) {  // By the other of a call and its hedge.
      quorum_.fail(row);
      continue;
    }
    const auto index = static_cast<std::size_t>(places[i]);
    std::memcpy(target + index * row_bytes, source + i * row_bytes, row_bytes);
    place.winner = static_cast<std::int32_t>(call);
    set_cell(index, pass_.batch().call(call).uid);
    --open_places_;
    quorum_.answer(row);
  }
  return {};
}

void ForwardPass::reject(std::size_t call) {
  for (const auto index : places_[call]) {
    auto& place = at(index);
    const auto row = index / k_;
    --place.pending;
    quorum_.fail(row);
    if (!place.free()) continue;
    --open_places_;
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
    std::fill(first, first + std::ptrdiff_t(k_), Place{});
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
    answered[place] = ranks_[place].answered();
    if (!answered[place]) std::memset(output + place * row_bytes, 0, row_bytes);
  }
  answers.outputs = outputs_;
  answers.cells = at::empty({rows_, k_, static_cast<std::int64_t>(options_.grid().size())}, at::kLong);
  std::copy(cells_.begin(), cells_.end(), answers.cells.data_ptr<std::int64_t>());
  for (std::size_t i = 0; i < pass_.batch().size(); ++i) {
    if (pass_.failure(i)) continue;
    auto call = answered_call(i);
    if (!call.places.empty()) answers.calls.push_back(std::move(call));
  }
  answers.over_capacity = over_capacity_;
  answers.spared = spared_;
  return answers;
}

/// Of a call the rows whose answer counts: a hedge, or the call that was slow, may have come second.
AnsweredCall ForwardPass::answered_call(std::size_t call) {
  const auto& sent = pass_.batch().call(call);
  AnsweredCall answered{sent.uid, sent.server, {}, sent.inputs, sent.compression};
  std::vector<std::int64_t> used;
  for (std::size_t i = 0; i < places_[call].size(); ++i) {
    if (at(places_[call][i]).winner != static_cast<std::int32_t>(call)) continue;
    answered.places.push_back(places_[call][i]);
    used.push_back(static_cast<std::int64_t>(i));
  }
  if (used.size() == places_[call].size() || used.empty()) return answered;
  for (auto& input : answered.inputs) input = input.index_select(0, torch::tensor(used, torch::kInt64));
  return answered;
}

std::uint64_t ForwardPass::hedges_used() const {
  std::vector<bool> used(pass_.batch().size());
  for (const auto& place : ranks_) {
    if (place.answered() && pass_.batch().call(static_cast<std::size_t>(place.winner)).hedge) {
      used[static_cast<std::size_t>(place.winner)] = true;
    }
  }
  return static_cast<std::uint64_t>(std::count(used.begin(), used.end(), true));
}

}  // namespace dmoe
