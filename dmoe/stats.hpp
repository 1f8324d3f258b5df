// What a layer counts about its calls.
#pragma once

#include "net/error.hpp"
#include "net/expert_uid.hpp"

#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace dmoe {

/// Sums since the layer was made. Plain values: a copy taken at one moment.
struct LayerStats {
  std::uint64_t forwards = 0;      ///< Forward passes that returned.
  std::uint64_t backwards = 0;     ///< Backward passes that returned.
  std::uint64_t calls = 0;         ///< Calls to experts, both directions.
  std::uint64_t frames = 0;        ///< Messages sent: at most one per server and direction, plus retries.
  std::uint64_t failed_calls = 0;  ///< Calls that gave no usable answer; the sum of failed_by_code.
  std::array<std::uint64_t, 10> failed_by_code{};  ///< Indexed by Errc.
  std::uint64_t rows = 0;                         ///< Input rows seen by forward.
  std::uint64_t rows_dropped = 0;        ///< Rows whose output was zero because fewer than k_min experts answered.
  std::uint64_t answers_dropped = 0;     ///< (row, expert) pairs that were chosen and did not contribute.
  std::uint64_t rows_over_capacity = 0;  ///< Of a SwitchDMoE: rows that no expert computed because theirs was full.
  std::uint64_t hedged_calls = 0;        ///< Of `calls`: sent to the next best expert besides one that was slow.
  std::uint64_t hedges_used = 0;         ///< Of those: answered first for at least one row.
  std::uint64_t superseded_calls = 0;    ///< Calls not waited for because a hedge had answered; no failures.
  std::uint64_t searches_cut_short = 0;  ///< Beam searches that ran into their time or width limit.
  std::chrono::nanoseconds waited{0};    ///< Time the trainer's thread waited for answers.
  std::chrono::nanoseconds lost_to_failures{0};  ///< The part of it after the last useful answer of a pass.

  std::uint64_t failed(Errc code) const { return failed_by_code.at(static_cast<std::size_t>(code)); }
};

/// Which experts a layer's gate chose. Plain values: a copy taken at one moment.
struct RoutingStats {
  std::uint64_t rows = 0;                     ///< That chose; each up to k_best experts.
  std::map<ExpertUid, std::uint64_t> chosen;  ///< Rows that chose each expert, whatever became of the call.
  /// Known at the latest forward: those that could be chosen, or all with a balancing bias and in a SwitchDMoE.
  std::size_t live_experts = 0;
  /// Mean over rows of the entropy, in nats, of the mixture over the chosen experts: log(k_best) where they weigh the
  /// same, 0 where one has all the weight.
  double entropy = 0;

  /// Of all choices, from 0 to 1.
  double share(const ExpertUid& uid) const;
  /// Standard deviation ÷ mean of the rows per live expert, those that nobody chose included; 0: even.
  double coefficient_of_variation() const;
};

/// What became of one call of a pass.
struct CallReport {
  ExpertUid uid;
  std::string server;  ///< "host:port"
  bool backward = false;
  std::int64_t rows = 0;
  std::uint64_t bytes_sent = 0;        ///< Tensor bytes.
  std::uint64_t bytes_received = 0;    ///< Tensor bytes.
  std::chrono::nanoseconds waited{0};  ///< From sending until the answer or the end of the pass.
  bool hedge = false;                  ///< Sent besides a call to a better expert, which was slow.
  bool answered = false;
  Errc code = Errc::kCancelled;  ///< When not answered.
  std::string message;           ///< When not answered.
};

}  // namespace dmoe
