#include "dmoe/pass.hpp"

#include "dmoe/server_health.hpp"
#include "dmoe/usual_times.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

namespace dmoe {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kConspicuousWait{100};
constexpr std::chrono::milliseconds kLeastPatience{5};  ///< Threads are woken up later than they could be.
/// A call whose expert's usual time is not known is asked about after this long.
constexpr std::chrono::milliseconds kUnknownTime{100};

}  // namespace

void Pass::send(std::vector<ExpertCall> calls) {
  failures_.resize(batch_.size() + calls.size());
  batch_.send(std::move(calls));
}

void Pass::run(const RowQuorum& quorum, const PassEvents& events) {
  last_useful_ = Clock::now();
  const auto settled = [&] { return events.settled && events.settled(); };
  while (batch_.outstanding() > 0 && !abandoned_ && !settled()) {
    const auto last = end(quorum);
    const auto alarm = events.next_alarm ? events.next_alarm() : CallBatch::TimePoint::max();
    auto answers = batch_.wait(std::min({last, alarm, next_question()}));
    if (answers.empty() && Clock::now() < last) {
      ask_about_overdue();
      if (events.on_alarm && alarm <= Clock::now()) events.on_alarm();
      continue;
    }
    for (auto& answer : answers) take(answer, events);
    if (answers.empty()) {
      if (quorum.met() || Clock::now() >= limits_.deadline) break;
      give_up_rest(events, false);  // Rows wait for answers that will hardly come: the time left is for others.
    }
    if (events.after_answers) events.after_answers();
  }
  if (batch_.outstanding() > 0) give_up_rest(events, settled());
}

CallBatch::TimePoint Pass::end(const RowQuorum& quorum) {
  if (!quorum.met()) {
    return limits_.patience > 0 ? std::min(limits_.deadline, end_of_patience(limits_.grace)) : limits_.deadline;
  }
  if (!end_of_grace_) end_of_grace_ = Clock::now() + limits_.grace;
  const auto end = std::min(*end_of_grace_, limits_.deadline);
  return limits_.patience > 0 ? std::min(end, end_of_patience(kLeastPatience)) : end;
}

void Pass::look_up_usual_times() {
  for (auto i = usual_.size(); i < batch_.size(); ++i) {  // Once per call: this is called after every answer.
    const auto& call = batch_.call(i);
    usual_.push_back(client_.usual_times(!call.grad_outputs.empty()).usual(call.uid));
    const auto expected = std::max<std::chrono::nanoseconds>(usual_[i].value_or(kUnknownTime) * 5 / 4, kLeastPatience);
    ask_at_.push_back(batch_.sent(i) + expected);
  }
}

CallBatch::TimePoint Pass::next_question() {
  look_up_usual_times();
  auto next = CallBatch::TimePoint::max();
  for (std::size_t i = 0; i < batch_.size(); ++i) {
    if (batch_.is_outstanding(i)) next = std::min(next, ask_at_[i]);
  }
  return next;
}

/// Waiting for an answer that was lost helps nobody, and its server knows. Asked again ever more seldom, since the
/// question or its answer may be lost as well.
void Pass::ask_about_overdue() {
  const auto now = Clock::now();
  std::vector<std::size_t> overdue;
  for (std::size_t i = 0; i < batch_.size(); ++i) {
    if (!batch_.is_outstanding(i) || ask_at_[i] > now) continue;
    overdue.push_back(i);
    ask_at_[i] = now + std::max<std::chrono::nanoseconds>(batch_.waited(i) / 4, kLeastPatience);
  }
  if (!overdue.empty()) batch_.check(overdue);
}

/// When every call that is out has taken longer than it should, by what its expert usually takes and by what others
/// took this time: where all are slower than usual, all are waited for. An expert of which little is known is.
CallBatch::TimePoint Pass::end_of_patience(std::chrono::milliseconds least) {
  look_up_usual_times();
  auto end = CallBatch::TimePoint::min();
  for (std::size_t i = 0; i < batch_.size(); ++i) {
    if (!batch_.is_outstanding(i)) continue;
    if (!usual_[i]) return CallBatch::TimePoint::max();
    const std::chrono::duration<double, std::nano> enough(std::max(*usual_[i], slowest_answer_) * limits_.patience);
    const auto rounded = std::chrono::ceil<std::chrono::nanoseconds>(enough) + kLeastPatience;
    end = std::max(end, batch_.sent(i) + std::max<std::chrono::nanoseconds>(rounded, least));
  }
  return end;
}

void Pass::take(Answer& answer, const PassEvents& events) {
  const auto& call = batch_.call(answer.call);
  std::optional<Error> error;
  if (answer.tensors.has_error()) {
    error = answer.tensors.error();
  } else if (const auto used = events.on_answer(answer.call, *answer.tensors); used.has_error()) {
    error = used.error();
  }
  if (!error) {
    last_useful_ = Clock::now();
    slowest_answer_ = std::max(slowest_answer_, batch_.waited(answer.call));
    client_.usual_times(!call.grad_outputs.empty()).answered(call.uid, batch_.waited(answer.call));
    client_.health().answered(call.uid, *call.server);
    return;
  }
  if (error->code == Errc::kLost) {  // Its server is alive and says so: no reason for a ban until it goes on and on.
    client_.health().overtaken(call.uid, call.server, /*alone=*/false);
  } else {
    client_.health().failed(call.uid, call.server, call.endpoint, *error);
  }
  failures_[answer.call] = std::move(error);
  events.on_failure(answer.call);
}

void Pass::give_up_rest(const PassEvents& events, bool settled) {
  if (!settled) lost_ += Clock::now() - std::exchange(last_useful_, Clock::now());
  std::vector<std::size_t> rest;
  for (std::size_t i = 0; i < batch_.size(); ++i) {
    if (!batch_.is_outstanding(i)) continue;
    const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(batch_.waited(i));
    const auto text = "no answer in " + std::to_string(waited.count()) + " ms";
    failures_[i] = settled ? Error{Errc::kCancelled, text + "; other experts answered its rows first", {}}
                           : Error{Errc::kDeadlineExceeded, text, {}};
    rest.push_back(i);
  }
  if (settled) superseded_ = rest.size();
  if (!abandoned_) blame_silent();
  for (const auto i : rest) {
    batch_.give_up(i);
    events.on_failure(i);
  }
}

/// A server that answered something, here or to another pass of this client, is alive, so only its late experts are
/// left alone.
void Pass::blame_silent() {
  std::map<net::PeerId, bool> answered;
  for (std::size_t i = 0; i < batch_.size(); ++i) {
    answered[batch_.call(i).server->peer] |= !batch_.is_outstanding(i) && !batch_.is_given_up(i);
  }
  std::set<net::PeerId> said;  // That they answered nothing: once is enough.
  for (std::size_t i = 0; i < batch_.size(); ++i) {
    if (!batch_.is_outstanding(i)) continue;
    const auto& call = batch_.call(i);
    const bool alone = !answered[call.server->peer] && !client_.health().heard_since(*call.server, batch_.sent(i));
    client_.usual_times(!call.grad_outputs.empty()).given_up(call.uid, batch_.waited(i));
    if (alone && !said.insert(call.server->peer).second) continue;
    if (!is_conspicuous(i)) {
      client_.health().overtaken(call.uid, call.server, alone);
    } else if (alone) {
      client_.health().silent(call.uid, call.server);
    } else {
      client_.health().failed(call.uid, call.server, call.endpoint,
                              {Errc::kDeadlineExceeded, failures_[i]->message, {}});
    }
  }
}

/// A pass that may end early leaves stragglers behind which are merely slower than others: no reason for a ban.
bool Pass::is_conspicuous(std::size_t call) const {
  return batch_.waited(call) >= std::max<std::chrono::nanoseconds>(4 * slowest_answer_, kConspicuousWait);
}

std::string Pass::describe_failures(const std::vector<std::size_t>& calls, std::size_t most) const {
  std::string text;
  std::size_t listed = 0;
  for (const auto i : calls) {
    if (!failures_[i]) continue;
    if (listed++ == most) return text + "; …";
    const auto& call = batch_.call(i);
    text += (text.empty() ? "" : "; ") + to_string(call.uid) + " on " + to_string(call.endpoint) + ": " +
            describe(*failures_[i]);
  }
  return text;
}

void Pass::add_to(LayerStats& stats) const {
  stats.calls += batch_.size();
  stats.frames += batch_.frames();
  stats.waited += batch_.blocked();
  stats.lost_to_failures += lost_;
  stats.superseded_calls += superseded_;
  for (const auto& failure : failures_) {
    if (!failure || (superseded_ > 0 && failure->code == Errc::kCancelled)) continue;
    ++stats.failed_calls;
    ++stats.failed_by_code.at(static_cast<std::size_t>(failure->code));
  }
}

std::vector<CallReport> Pass::reports() const {
  std::vector<CallReport> reports;
  reports.reserve(batch_.size());
  for (std::size_t i = 0; i < batch_.size(); ++i) {
    const auto& call = batch_.call(i);
    CallReport report;
    report.uid = call.uid;
    report.server = to_string(call.endpoint);
    report.backward = !call.grad_outputs.empty();
    report.rows = call.rows();
    report.bytes_sent = batch_.bytes_sent(i);
    report.bytes_received = batch_.bytes_received(i);
    report.waited = batch_.waited(i);
    report.hedge = call.hedge;
    report.answered = !failures_[i];
    if (failures_[i]) {
      report.code = failures_[i]->code;
      report.message = failures_[i]->message;
    }
    reports.push_back(std::move(report));
  }
  return reports;
}

}  // namespace dmoe
