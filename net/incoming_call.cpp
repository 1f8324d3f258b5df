#include "net/session.hpp"

#include <kj/exception.h>

#include <exception>
#include <utility>

namespace dmoe::net {
namespace {

using Fill = std::function<void(schema::Reply::Builder, Attachments&)>;

Result<OutgoingFramePtr> build_reply(std::uint64_t id, const Fill& fill, std::size_t max_bytes) {
  try {
    auto frame = std::make_unique<OutgoingFrame>();
    auto reply = frame->root().initReplies(1)[0];
    reply.setId(id);
    fill(reply, frame->attachments());
    const auto finished = frame->finish(max_bytes);
    if (finished.has_error()) return finished.error();
    return frame;
  } catch (const kj::Exception& failure) {
    return Error{Errc::kInternal, std::string("the reply cannot be encoded: ") + failure.getDescription().cStr(), {}};
  } catch (const std::exception& failure) {
    return Error{Errc::kInternal, std::string("the reply cannot be encoded: ") + failure.what(), {}};
  }
}

}  // namespace

thread_local const IncomingCall::State* IncomingCall::State::in_handler = nullptr;

IncomingCall::IncomingCall(std::shared_ptr<State> state) : state_(std::move(state)) {}
IncomingCall::IncomingCall(IncomingCall&&) noexcept = default;

IncomingCall& IncomingCall::operator=(IncomingCall&& other) noexcept {
  std::swap(state_, other.state_);
  return *this;
}

IncomingCall::~IncomingCall() {
  if (!state_ || (std::uncaught_exceptions() > 0 && State::in_handler == state_.get())) return;
  fail({Errc::kInternal, "the server dropped the call without an answer", {}});
}

schema::Call::Reader IncomingCall::reader() const { return state_->reader; }
std::shared_ptr<const void> IncomingCall::frame() const { return state_->frame; }
std::chrono::steady_clock::time_point IncomingCall::deadline() const { return state_->deadline; }
bool IncomingCall::frame_is_counted() const noexcept { return state_->frame->counted(); }
bool IncomingCall::cancelled() const noexcept { return state_->cancelled; }
const std::string& IncomingCall::caller() const { return state_->session->peer(); }

void IncomingCall::reply(const Fill& fill) {
  if (state_->answered.exchange(true)) return;
  Session& session = *state_->session;
  if (state_->cancelled) {
    ServerCounters::add(session.counters().cancelled);
    return session.deliver(state_->id, nullptr);
  }
  auto frame = build_reply(state_->id, fill, session.max_frame_bytes());
  if (frame.has_error()) {
    const Error error = frame.error();
    session.counters().count_outcome(&error);
    return session.deliver(state_->id, error_frame(state_->id, error));
  }
  session.counters().count_outcome(nullptr);
  session.deliver(state_->id, std::move(*frame));
}

void IncomingCall::fail(const Error& error) {
  if (state_->answered.exchange(true)) return;
  Session& session = *state_->session;
  session.counters().count_outcome(&error);
  session.deliver(state_->id, state_->cancelled ? nullptr : error_frame(state_->id, error));
}

}  // namespace dmoe::net
