// One forward pass of a DMoE layer over the network. Private to dmoe/.
#pragma once

#include "dmoe/dmoe.hpp"
#include "dmoe/pass.hpp"
#include "gating/beam_search.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace dmoe {

/// How rows may be chosen experts for, beyond DMoEOptions.
struct RoutingLimits {
  /// Rows that one expert takes: this times an even share of all rows, rounded up; those whose choice ranks lower there
  /// are over its capacity and go to nobody. 0: no limit.
  double capacity_factor = 0;
  /// Whether all live experts of the grid must be known, not only those that could be chosen: where the load of all
  /// counts.
  bool whole_grid = false;
};

/// What rows are searched experts for by: CPU, contiguous, float32; one [rows, grid[d]] tensor per dimension.
struct ChoiceLogits {
  std::vector<at::Tensor> used;
  /// Before dropout set cells of `used` to -inf; empty where none did. Rows to which dropout, or failures, left too few
  /// experts are searched by these.
  std::vector<at::Tensor> whole;
};

/// The rows that one expert answered, kept for backward.
struct AnsweredCall {
  ExpertUid uid;
  std::shared_ptr<const dht::ServerAddress> server;
  std::vector<std::int64_t> places;              ///< row * k + rank, one per row of `inputs`.
  std::vector<at::Tensor> inputs;                ///< CPU, contiguous, as they were sent.
  Compression compression = Compression::kNone;  ///< Of the call.
};

/// What a forward pass came to. `k` is the number of ranks per row.
struct MixtureAnswers {
  std::int64_t rows = 0;
  std::int64_t k = 0;
  std::uint64_t seed = 0;
  at::Tensor outputs;   ///< [rows, k, out…] CPU, of the input's dtype; zero where nobody answered.
  at::Tensor answered;  ///< [rows, k] bool, CPU.
  at::Tensor cells;     ///< [rows, k, D] int64, CPU: the experts' coordinates; zeros where there is none.
  std::vector<AnsweredCall> calls;
  std::vector<std::int64_t> over_capacity;  ///< Rows.
  std::vector<std::int64_t> spared;         ///< Rows that were searched by ChoiceLogits::whole.
};

/// Chooses, calls and collects. Belongs to one thread.
class ForwardPass {
 public:
  /// @param inputs CPU, contiguous; [rows, …] each; outlive the pass, as do all references. @param row_shape an
  /// expert's output for one row.
  ForwardPass(Client& client, gating::BeamSearch& search, const DMoEOptions& options,
              const std::vector<at::Tensor>& inputs, ChoiceLogits logits, std::vector<std::int64_t> row_shape,
              const RoutingLimits& limits = {});

  /// @throws Exception when rows are below k_min and zeros are not allowed.
  MixtureAnswers run();

  const Pass& pass() const noexcept { return pass_; }
  /// What the search found for every row, before anything failed. @pre `run` was called
  const gating::BeamResult& choices() const { return *choices_; }
  std::uint64_t hedged_calls() const noexcept { return hedged_calls_; }
  std::uint64_t hedges_used() const;
  std::uint64_t rows_dropped() const noexcept { return rows_dropped_; }
  std::uint64_t answers_dropped() const noexcept { return answers_dropped_; }
  bool cut_short() const noexcept { return cut_short_; }

 private:
  /// One of a row's k answers.
  struct Place {
    static constexpr std::int32_t kNobody = -1;
    std::int32_t winner = kNobody;  ///< The call whose answer it holds.
    std::uint16_t pending = 0;      ///< Calls that may fill it: one, and its hedge.
    bool answered() const noexcept { return winner != kNobody; }
    bool free() const noexcept { return winner == kNobody && pending == 0; }
  };

  struct Assignment {
    std::uint32_t expert;  ///< Of the search's result.
    std::int64_t row;
    std::int64_t rank;
  };

  void choose_all();
  std::vector<std::int64_t> rows_short_of_experts() const;
  void spare(const std::vector<std::int64_t>& rows);
  void excuse_over_capacity();
  void replace_lost();
  CallBatch::TimePoint next_hedge() const;
  void hedge_slow();
  std::vector<Assignment> hedges_for(const std::vector<std::size_t>& slow, const gating::BeamResult& found,
                                     const std::vector<std::int64_t>& rows) const;
  gating::BeamResult search(const std::vector<std::int64_t>& rows, std::size_t k);
  bool was_tried(std::int64_t row, const ExpertUid& uid) const;
  void launch(std::vector<Assignment> assignments, const gating::BeamResult& found, bool hedge = false);
  void set_cell(std::size_t place, const ExpertUid& uid);
  Place& at(std::int64_t place) { return ranks_[static_cast<std::size_t>(place)]; }
  const Place& at(std::int64_t place) const { return ranks_[static_cast<std::size_t>(place)]; }
  ExpertCall make_call(const gating::LiveExpert& expert, const std::vector<at::Tensor>& gathered, std::int64_t begin,
                       std::int64_t count) const;
  Result<void> accept(std::size_t call, const std::vector<at::Tensor>& tensors);
  void reject(std::size_t call);
  void settle_rows();
  AnsweredCall answered_call(std::size_t call);
  [[noreturn]] void fail_row(std::int64_t row) const;
  MixtureAnswers collect();

  Client& client_;
  gating::BeamSearch& search_;
  const DMoEOptions& options_;
  const std::vector<at::Tensor>& inputs_;
  ChoiceLogits logits_;
  const std::vector<std::int64_t> row_shape_;
  const RoutingLimits limits_;
  const std::int64_t rows_;
  const std::int64_t k_;
  const CallBatch::TimePoint start_;
  const CallBatch::TimePoint deadline_;
  const std::uint64_t seed_;

  Pass pass_;
  RowQuorum quorum_;
  at::Tensor outputs_;
  std::vector<Place> ranks_;                         // rows × k.
  std::size_t open_places_ = 0;                      // Of them: called for and not answered.
  std::vector<std::vector<std::int64_t>> places_;    // Of each call: row * k + rank, one per row.
  std::vector<std::vector<std::size_t>> row_calls_;  // Of each row that lost answers: its calls so far.
  std::vector<std::int64_t> lost_rows_;              // To be replaced.
  std::vector<std::uint8_t> replacements_;           // Rounds so far, per row.
  std::vector<std::int64_t> cells_;                  // rows × k × D.
  std::vector<CallBatch::TimePoint> hedge_at_;       // Of each call: when it becomes slow; max(): never.
  std::vector<std::int64_t> over_capacity_;          // Rows.
  std::vector<std::int64_t> spared_;                 // Rows.
  std::optional<gating::BeamResult> choices_;
  std::uint64_t hedged_calls_ = 0;
  std::size_t known_experts_ = 0;
  std::size_t unanswered_lookups_ = 0;
  std::uint64_t rows_dropped_ = 0;
  std::uint64_t answers_dropped_ = 0;
  bool cut_short_ = false;
};

}  // namespace dmoe
