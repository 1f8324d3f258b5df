#include "expert_server/call_trace.hpp"

#include <utility>

namespace dmoe::expert_server {

CallTrace::CallTrace(std::shared_ptr<net::TraceFile> file, const std::string& uid, Direction direction,
                     std::uint64_t seed, TimePoint arrived)
    : file_(std::move(file)), arrived_(arrived) {
  if (!file_) return;
  uid_ = uid;
  id_ = net::trace_id(seed, uid, direction == Direction::kBackward);
}

void CallTrace::started(TimePoint now, std::size_t tasks, std::int64_t rows) {
  started_ = now;
  tasks_ = tasks;
  rows_ = rows;
}

void CallTrace::replied(TimePoint now) {
  if (!file_) return;
  add("queue", arrived_, started_);
  add("device", started_, computed_);
  add("reply", computed_, now);
}

void CallTrace::failed(TimePoint now, const Error& error) {
  if (!file_) return;
  const bool computed = started_ != TimePoint{};
  if (computed) add("queue", arrived_, started_);
  add(computed ? "device" : "queue", computed ? started_ : arrived_, now, describe(error));
}

void CallTrace::add(const char* what, TimePoint begin, TimePoint end, const std::string& error) {
  net::TraceSpan span;
  span.name = std::string(what) + " " + uid_;
  span.call = id_;
  span.begin = begin;
  span.end = end;
  if (tasks_ > 0) span.details = {{"calls in batch", std::to_string(tasks_)}, {"rows in batch", std::to_string(rows_)}};
  if (!error.empty()) span.details.emplace_back("error", error);
  file_->add(std::move(span));
}

}  // namespace dmoe::expert_server
