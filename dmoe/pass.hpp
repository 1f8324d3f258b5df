// What a layer's forward and backward passes share: how they wait, and how they account for it. Private to dmoe/.
#pragma once

#include "dmoe/call_batch.hpp"
#include "dmoe/client.hpp"
#include "dmoe/row_quorum.hpp"
#include "dmoe/stats.hpp"

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace dmoe {

/// When a pass ends.
struct PassLimits {
  CallBatch::TimePoint deadline;
  std::chrono::milliseconds grace{0};  ///< After every row has what it needs.
  /// Then, times what a call usually takes: it is not waited for longer. Before, a call that also took longer than
  /// `grace` is given up, so that others may be asked. 0: all of `grace`, and of the deadline.
  double patience = 0;
};

/// What a pass does with its calls. Called on the thread of `Pass::run`.
struct PassEvents {
  /// An answer came: uses it, or says what is wrong with it.
  std::function<Result<void>(std::size_t call, const std::vector<at::Tensor>& tensors)> on_answer;
  /// The call gave no usable answer.
  std::function<void(std::size_t call)> on_failure;
  /// All answers that were there have been handled: the moment to send replacements.
  std::function<void()> after_answers;
  /// When `on_alarm` wants to be called while answers are waited for; time_point::max(): not at all. Asked again after
  /// every wait.
  std::function<CallBatch::TimePoint()> next_alarm;
  std::function<void()> on_alarm;
  /// Whether no call that is still out can add anything: then none is waited for.
  std::function<bool()> settled;
};

/// The calls of one pass with what became of them. Failures are reported to the client's ServerHealth as they happen.
class Pass {
 public:
  Pass(Client& client, PassLimits limits)
      : client_(client),
        limits_(limits),
        batch_(client.rpc(), client.max_frame_bytes(), limits.deadline, client.trace()) {}

  CallBatch& batch() noexcept { return batch_; }
  const CallBatch& batch() const noexcept { return batch_; }
  void send(std::vector<ExpertCall> calls);

  /// Until all answers are in or the limits say stop. Then cancels the rest, which count as kDeadlineExceeded, or as
  /// kCancelled and not as failed when they were settled otherwise. Calls that are overdue while rows need more answers
  /// are given up before: then `after_answers` may send others.
  void run(const RowQuorum& quorum, const PassEvents& events);

  /// Ends `run` early, from one of its functions.
  void abandon() noexcept { abandoned_ = true; }

  const std::optional<Error>& failure(std::size_t call) const { return failures_[call]; }
  /// "ffn.0.3 on 127.0.0.1:4000: unavailable: …" for at most `most` failed calls.
  std::string describe_failures(const std::vector<std::size_t>& calls, std::size_t most = 4) const;

  void add_to(LayerStats& stats) const;
  std::vector<CallReport> reports() const;

 private:
  CallBatch::TimePoint end(const RowQuorum& quorum);
  CallBatch::TimePoint end_of_patience(std::chrono::milliseconds least);
  CallBatch::TimePoint next_question();
  void ask_about_overdue();
  void look_up_usual_times();
  void take(Answer& answer, const PassEvents& events);
  void give_up_rest(const PassEvents& events, bool settled);
  void blame_silent();
  bool is_conspicuous(std::size_t call) const;

  Client& client_;
  const PassLimits limits_;
  CallBatch batch_;
  std::vector<std::optional<Error>> failures_;  // One per call of the batch.
  std::vector<CallBatch::TimePoint> ask_at_;    // Of each call: when to ask whether its answer is still to come.
  std::optional<CallBatch::TimePoint> end_of_grace_;
  std::vector<std::optional<std::chrono::nanoseconds>> usual_;  // Times of the calls' experts, as far as asked for.
  CallBatch::TimePoint last_useful_;
  std::chrono::nanoseconds slowest_answer_{0};
  std::chrono::nanoseconds lost_{0};
  std::size_t superseded_ = 0;  // Of failures_: nobody needed their answer any more.
  bool abandoned_ = false;
};

}  // namespace dmoe
