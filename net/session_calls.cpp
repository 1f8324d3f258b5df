// Calls on an upgraded connection: taken in order, answered in any.
#include "net/session.hpp"

#include <boost/asio/post.hpp>

#include <limits>
#include <utility>

namespace dmoe::net {
namespace {

using Clock = std::chrono::steady_clock;

/// Waiting callers of a full connection come back about when a batch is done.
constexpr std::chrono::milliseconds kRetryAfter{20};

bool is_known(schema::Call::Which kind) noexcept {
  return kind == schema::Call::INFO || kind == schema::Call::FORWARD || kind == schema::Call::BACKWARD;
}

}  // namespace

OutgoingFramePtr error_frame(std::uint64_t id, const Error& error) {
  auto frame = std::make_unique<OutgoingFrame>();
  auto reply = frame->root().initReplies(1)[0];
  reply.setId(id);
  write_error(error, reply.initError());
  (void)frame->finish(std::numeric_limits<std::size_t>::max());
  return frame;
}

void Session::on_frame(std::shared_ptr<const ReceivedFrame> frame) {
  ServerCounters::add(server_->counters.bytes_in, static_cast<double>(frame->size()));
  const auto root = frame->root();
  if (root.isCancel()) {
    for (const auto id : root.getCancel()) on_cancel(id);
    return;
  }
  for (const auto call : root.getCalls()) {
    if (closed()) return;
    on_call(frame, call);
  }
}

void Session::on_frame_refused(const std::vector<std::uint64_t>& calls, const Error& why) {
  for (const auto id : calls) {
    server_->counters.count_outcome(&why);
    send(error_frame(id, why));
  }
}

void Session::on_call(const std::shared_ptr<const ReceivedFrame>& frame, schema::Call::Reader call) {
  if (call.isProgress()) return tell_progress(call.getId(), call.getProgress());
  if (const auto refused = reason_to_refuse(call)) {
    server_->counters.count_outcome(&*refused);
    return send(error_frame(call.getId(), *refused));
  }
  const auto state =
      std::make_shared<IncomingCall::State>(std::static_pointer_cast<Session>(shared_from_this()), frame, call);
  if (call.getTimeoutMillis() != 0) {
    state->deadline = Clock::now() + std::chrono::milliseconds{call.getTimeoutMillis()};
  }
  if (!calls_.emplace(state->id, state).second) {
    state->answered = true;
    return refuse("two calls with the id " + std::to_string(state->id));
  }
  idle_ = false;
  hand_over(state);
}

/// Answered here and at once, also while calls are refused: it tells the caller which answers to wait for.
void Session::tell_progress(std::uint64_t id, capnp::List<std::uint64_t>::Reader asked) {
  std::vector<std::uint64_t> unanswered;
  for (const auto call : asked) {
    if (calls_.count(call) > 0) unanswered.push_back(call);
  }
  auto frame = std::make_unique<OutgoingFrame>();
  auto reply = frame->root().initReplies(1)[0];
  reply.setId(id);
  auto list = reply.initProgress(static_cast<unsigned>(unanswered.size()));
  for (unsigned i = 0; i < unanswered.size(); ++i) list.set(i, unanswered[i]);
  (void)frame->finish(std::numeric_limits<std::size_t>::max());  // Bounded by the question, whose frame was let in.
  send(std::move(frame));
}

void Session::hand_over(const std::shared_ptr<IncomingCall::State>& state) {
  const auto* const outer = std::exchange(IncomingCall::State::in_handler, state.get());
  std::optional<Error> failed;
  try {
    server_->on_call(IncomingCall(state));
  } catch (const std::exception& failure) {
    failed = Error{Errc::kInternal, failure.what(), {}};
  } catch (...) {
    failed = Error{Errc::kInternal, "the server's handler failed", {}};
  }
  IncomingCall::State::in_handler = outer;
  if (failed) IncomingCall(state).fail(*failed);  // Too late, and ignored, if the handler had handed the call on.
}

std::optional<Error> Session::reason_to_refuse(schema::Call::Reader call) const {
  if (server_->draining) return Error{Errc::kUnavailable, "this server is shutting down; use another expert", {}};
  if (calls_.size() >= server_->options.max_calls_per_connection) {
    return Error{Errc::kOverloaded,
                 "this connection has " + std::to_string(calls_.size()) +
                     " calls in flight (max_calls_per_connection); wait for some of them",
                 kRetryAfter};
  }
  if (!is_known(call.which())) {
    return Error{Errc::kInvalidArgument,
                 "this server speaks " + std::string(kProtocolName) + " and does not know calls of kind " +
                     std::to_string(static_cast<unsigned>(call.which())),
                 {}};
  }
  return std::nullopt;
}

void Session::on_cancel(std::uint64_t id) {
  const auto found = calls_.find(id);
  if (found == calls_.end()) return;  // Answered meanwhile.
  if (const auto state = found->second.lock()) state->cancelled = true;
}

void Session::cancel_all() {
  for (const auto& [id, call] : calls_) {
    if (const auto state = call.lock()) state->cancelled = true;
  }
}

void Session::on_closed(const Error& /*why*/) {
  cancel_all();
  server_->forget(this);
}

void Session::on_sent(std::size_t bytes) {
  ServerCounters::add(server_->counters.bytes_out, static_cast<double>(bytes));
  update_idle();
}

void Session::update_idle() {
  idle_since_ = Clock::now().time_since_epoch().count();
  idle_ = calls_.empty() && nothing_to_send();
}

void Session::shut_down() {
  cancel_all();
  if (request_deadline_) return abort({Errc::kUnavailable, "the server stopped", {}});
  close(boost::beast::websocket::close_code::going_away, "the server stopped");
}

void Session::deliver(std::uint64_t id, OutgoingFramePtr reply) {
  if (strand().running_in_this_thread()) return finish_call(id, std::move(reply));
  bool first = false;
  {
    const std::lock_guard lock(inbox_mutex_);
    first = inbox_.empty();
    inbox_.emplace_back(id, std::move(reply));
  }
  // One hop for all replies that come before it runs.
  if (!first) return;
  boost::asio::post(strand(),
                    [self = std::static_pointer_cast<Session>(shared_from_this())] { self->deliver_inbox(); });
}

void Session::deliver_inbox() {
  std::vector<std::pair<std::uint64_t, OutgoingFramePtr>> replies;
  {
    const std::lock_guard lock(inbox_mutex_);
    replies.swap(inbox_);
  }
  for (auto& [id, reply] : replies) finish_call(id, std::move(reply));
}

void Session::finish_call(std::uint64_t id, OutgoingFramePtr reply) {
  calls_.erase(id);
  if (reply) {
    send(std::move(reply));
  } else {
    update_idle();
  }
}

}  // namespace dmoe::net
