#include "net/client_pool.hpp"

#include <kj/exception.h>
#include "net/frame_memory.hpp"

#include <boost/asio/dispatch.hpp>
#include <boost/asio/post.hpp>

#include <algorithm>
#include <exception>
#include <limits>
#include <stdexcept>
#include <utility>

namespace dmoe::net {

namespace asio = boost::asio;
using boost::system::error_code;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

namespace {

constexpr std::chrono::seconds kKeepFrameMemory{5};
constexpr std::chrono::seconds kProgressTimeout{5};
constexpr std::size_t kMostMeanwhile = 4;  ///< Times bulk_bytes, on the first connection while the second opens.

std::string describe_call(schema::Call::Reader call) {
  switch (call.which()) {
    case schema::Call::INFO: return std::string("info ") + call.getInfo().getUid().cStr();
    case schema::Call::FORWARD: return std::string("forward ") + call.getForward().getUid().cStr();
    case schema::Call::BACKWARD: return std::string("backward ") + call.getBackward().getUid().cStr();
    case schema::Call::PROGRESS: break;
  }
  return "a call";
}

/// Rounded up: a call with 0.4 ms left must not travel as one without a deadline.
std::uint32_t remaining_millis(Clock::time_point deadline, Clock::time_point now) {
  if (deadline == Clock::time_point::max()) return 0;
  const auto left = std::chrono::ceil<milliseconds>(deadline - now).count();
  return static_cast<std::uint32_t>(std::clamp<std::int64_t>(left, 1, std::numeric_limits<std::uint32_t>::max()));
}

std::string millis_text(Clock::duration duration) {
  return std::to_string(std::chrono::duration_cast<milliseconds>(duration).count()) + " ms";
}

LinkOptions link_options_of(const RpcClientOptions& options) {
  LinkOptions link;
  link.peer = ReceivedFrame::From::kServer;
  link.max_frame_bytes = options.max_frame_bytes;
  link.handshake_timeout = options.connect_timeout;
  link.ping_after = options.keepalive;
  link.dead_after = 2 * options.keepalive;
  return link;
}

}  // namespace

RpcClient::Pool::Pool(const Strand& strand, RpcClientOptions options)
    : strand_(strand),
      options_(options),
      deadline_timer_(strand),
      tick_timer_(strand),
      random_(std::random_device{}()) {}

std::vector<CallId> RpcClient::Pool::start(const Endpoint& endpoint, std::vector<CallSpec> calls) {
  std::vector<CallId> ids(calls.size());
  for (auto& id : ids) id = new_id();
  if (!calls.empty()) enqueue(submit(endpoint, ids, std::move(calls)));
  return ids;
}

CallId RpcClient::Pool::start_as(CallId id, const Endpoint& endpoint, CallSpec call) {
  std::vector<CallSpec> calls;
  calls.push_back(std::move(call));
  enqueue(submit(endpoint, {id}, std::move(calls)));
  return id;
}

RpcClient::Pool::Submission RpcClient::Pool::submit(const Endpoint& endpoint, const std::vector<CallId>& ids,
                                                    std::vector<CallSpec> calls) const {
  Submission submission{endpoint, {}, std::make_unique<OutgoingFrame>(), {}};
  submission.calls.reserve(calls.size());
  const auto now = Clock::now();
  for (std::size_t i = 0; i < calls.size(); ++i) {
    submission.calls.emplace_back(ids[i], Pending{std::move(calls[i].on_reply), calls[i].deadline, now, {}, {}});
  }
  try {
    if (calls.size() > kMaxMessagesPerFrame) throw std::length_error("more calls than a frame may have");
    auto list = submission.frame->root().initCalls(static_cast<unsigned>(calls.size()));
    for (unsigned i = 0; i < calls.size(); ++i) {
      auto call = list[i];
      call.setId(ids[i]);
      call.setTimeoutMillis(remaining_millis(calls[i].deadline, now));
      calls[i].fill(call, submission.frame->attachments());
      submission.calls[i].second.what = describe_call(call.asReader());
    }
    const auto finished = submission.frame->finish(options_.max_frame_bytes);
    if (finished.has_error()) submission.failure = finished.error();
  } catch (const kj::Exception& failure) {
    submission.failure = Error{Errc::kInvalidArgument, failure.getDescription().cStr(), {}};
  } catch (const std::exception& failure) {
    submission.failure = Error{Errc::kInvalidArgument, failure.what(), {}};
  }
  if (submission.failure) submission.frame.reset();
  return submission;
}

void RpcClient::Pool::enqueue(Submission submission) {
  if (strand_.running_in_this_thread()) return accept(std::move(submission));
  bool first = false;
  {
    const std::lock_guard lock(inbox_mutex_);
    first = inbox_.empty();
    inbox_.push_back(std::move(submission));
  }
  // One hop for all submissions that come before it runs.
  if (first) asio::post(strand_, [self = shared_from_this()] { self->take_inbox(); });
}

void RpcClient::Pool::take_inbox() {
  std::vector<Submission> submissions;
  {
    const std::lock_guard lock(inbox_mutex_);
    submissions.swap(inbox_);
  }
  for (auto& submission : submissions) accept(std::move(submission));
}

void RpcClient::Pool::accept(Submission submission) {
  if (stopped_) return fail_later(std::move(submission.calls), {Errc::kCancelled, "this client was stopped", {}});
  if (submission.failure) return fail_later(std::move(submission.calls), *submission.failure);
  auto connection = connection_for(submission.endpoint, submission.frame->size());
  if (connection.has_error()) return fail_later(std::move(submission.calls), connection.error());
  if ((*connection)->queued_bytes() + submission.frame->size() > options_.max_queued_bytes) {
    return fail_later(std::move(submission.calls),
                      {Errc::kOverloaded,
                       std::to_string((*connection)->queued_bytes()) + " bytes already wait to be sent to " +
                           to_string(submission.endpoint) + " (max_queued_bytes); send less or use another expert",
                       milliseconds{50}});
  }
  for (auto& [id, call] : submission.calls) {
    call.connection = *connection;
    add(id, std::move(call));
  }
  arm_deadline_timer();
  (*connection)->send(std::move(submission.frame));
}

Result<std::shared_ptr<Connection>> RpcClient::Pool::connection_for(const Endpoint& endpoint, std::size_t bytes) {
  auto& peer = peers_[endpoint];
  const bool bulk = bytes > options_.bulk_bytes;
  auto& lane = peer.lanes.at(bulk ? 1 : 0);
  // Two round trips until the second connection is open: more than a frame of moderate size delays others.
  const auto control = peer.lanes[0];
  const bool meanwhile = bulk && !(lane && lane->is_open()) && control && control->is_open() &&
                         control->queued_bytes() + bytes <= kMostMeanwhile * options_.bulk_bytes;
  if (lane) return meanwhile ? control : lane;
  const auto now = Clock::now();
  if (now < peer.retry_at) {
    if (meanwhile) return control;
    return Error{Errc::kUnavailable, peer.failure + "; the next attempt is in " + millis_text(peer.retry_at - now), {}};
  }
  lane = std::make_shared<Connection>(strand_, endpoint, bulk, link_options_of(options_), options_.connect_timeout,
                                      weak_from_this());
  lane->idle_since = now;  // Maybe nothing is waiting for it.
  // Later: a dial that fails at once must not end a call inside the function that starts it.
  asio::post(strand_, [connection = lane] {
    if (!connection->closed()) connection->dial();
  });
  schedule_tick();
  return meanwhile ? control : lane;
}

void RpcClient::Pool::on_open(Connection& connection) {
  peers_[connection.endpoint()].backoff = milliseconds{0};
  // Time went by while dialling: say what is left of each call, and leave out those that were given up.
  const auto now = Clock::now();
  connection.discard_queued_if([&](OutgoingFrame& frame) {
    if (!frame.root().isCalls()) return true;  // Cancels of calls that were never sent.
    bool wanted = false;
    for (auto call : frame.root().getCalls()) {
      const auto found = calls_.find(call.getId());
      if (found == calls_.end()) continue;
      wanted = true;
      call.setTimeoutMillis(remaining_millis(found->second.deadline, now));
    }
    return !wanted;
  });
}

void RpcClient::Pool::on_replies(Connection& connection, std::shared_ptr<const ReceivedFrame> frame) {
  for (const auto reply : frame->root().getReplies()) {
    const auto found = calls_.find(reply.getId());
    // Unknown: given up meanwhile. Of another connection: a peer that guesses ids.
    if (found == calls_.end() || found->second.connection.get() != &connection) continue;
    auto call = take(reply.getId());
    if (reply.isError()) {
      call->on_reply(read_error(reply.getError()));
    } else {
      call->on_reply(IncomingReply(frame, reply));
    }
  }
}

void RpcClient::Pool::on_gone(Connection& connection, bool dialled, const Error& why) {
  const auto found = peers_.find(connection.endpoint());
  if (found != peers_.end()) {
    auto& lane = found->second.lanes.at(connection.bulk() ? 1 : 0);
    if (lane.get() == &connection) lane.reset();
    if (!dialled && !stopped_) note_failed_dial(found->second, why);
  }
  std::vector<CallId> lost;
  for (const auto& [id, call] : calls_) {
    if (call.connection.get() == &connection) lost.push_back(id);
  }
  const std::string where = dialled ? " on " + to_string(connection.endpoint()) + ": " : ": ";
  for (const auto id : lost) {
    const auto call = calls_.find(id);
    if (call == calls_.end()) continue;  // A callback gave it up.
    fail(id, {stopped_ ? Errc::kCancelled : Errc::kUnavailable, call->second.what + where + why.message, {}});
  }
}

void RpcClient::Pool::note_failed_dial(Peer& peer, const Error& why) {
  const auto now = Clock::now();
  if (now < peer.retry_at) return;  // The other lane's dial has just failed too.
  peer.backoff = peer.backoff.count() == 0 ? options_.first_backoff : std::min(2 * peer.backoff, options_.max_backoff);
  const double jitter = std::uniform_real_distribution<>(0.5, 1.0)(random_);
  peer.retry_at = now + std::chrono::duration_cast<Clock::duration>(peer.backoff * jitter);
  peer.failure = why.message;
}

void RpcClient::Pool::add(CallId id, Pending call) {
  ++call.connection->calls_in_flight;
  if (call.deadline != TimePoint::max()) deadlines_.emplace(call.deadline, id);
  calls_.emplace(id, std::move(call));
}

std::optional<RpcClient::Pool::Pending> RpcClient::Pool::take(CallId id) {
  auto node = calls_.extract(id);
  if (node.empty()) return std::nullopt;
  Pending call = std::move(node.mapped());
  deadlines_.erase({call.deadline, id});
  if (--call.connection->calls_in_flight == 0) call.connection->idle_since = Clock::now();
  return call;
}

void RpcClient::Pool::fail(CallId id, Error error) {
  if (auto call = take(id)) call->on_reply(std::move(error));
}

void RpcClient::Pool::fail_later(std::vector<std::pair<CallId, Pending>> calls, const Error& error) {
  asio::post(strand_, [calls = std::move(calls), error] {
    for (const auto& [id, call] : calls) {
      Error of_call = error;
      if (!call.what.empty()) of_call.message = call.what + ": " + error.message;
      call.on_reply(std::move(of_call));
    }
  });
}

void RpcClient::Pool::cancel(CallId id) {
  asio::post(strand_, [self = shared_from_this(), id] {
    self->give_up(id, {Errc::kCancelled, "the caller gave up", {}});
  });
}

void RpcClient::Pool::give_up(CallId id, Error error) {
  auto call = take(id);
  if (!call) return;
  send_cancel(*call->connection, id);
  call->on_reply(std::move(error));
}

void RpcClient::Pool::send_cancel(Connection& connection, CallId id) {
  auto frame = std::make_unique<OutgoingFrame>();
  frame->root().initCancel(1).set(0, id);
  (void)frame->finish(options_.max_frame_bytes);
  connection.send(std::move(frame));
}

void RpcClient::Pool::check(std::vector<CallId> ids) {
  asio::post(strand_, [self = shared_from_this(), ids = std::move(ids)] {
    std::unordered_map<std::shared_ptr<Connection>, std::vector<CallId>> by_connection;
    for (const auto id : ids) {
      const auto found = self->calls_.find(id);
      if (found != self->calls_.end()) by_connection[found->second.connection].push_back(id);
    }
    for (auto& [connection, of_it] : by_connection) {
      if (of_it.size() <= kMaxMessagesPerFrame) self->ask_progress(connection, std::move(of_it));
    }
  });
}

/// On the connection of the calls: the order of its frames is what makes the answer mean something.
void RpcClient::Pool::ask_progress(const std::shared_ptr<Connection>& connection, std::vector<CallId> ids) {
  const auto question = new_id();
  auto frame = std::make_unique<OutgoingFrame>();
  auto call = frame->root().initCalls(1)[0];
  call.setId(question);
  call.setTimeoutMillis(static_cast<std::uint32_t>(milliseconds(kProgressTimeout).count()));
  auto list = call.initProgress(static_cast<unsigned>(ids.size()));
  for (unsigned i = 0; i < ids.size(); ++i) list.set(i, ids[i]);
  if (frame->finish(options_.max_frame_bytes).has_error()) return;
  const auto now = Clock::now();
  auto on_reply = [self = this, asked = std::move(ids), connection](const Result<IncomingReply>& reply) {
    if (reply.has_value()) self->fail_lost(*connection, asked, reply->reader());
  };
  add(question, Pending{std::move(on_reply), now + kProgressTimeout, now, "a question", connection});
  arm_deadline_timer();
  connection->send(std::move(frame));
}

void RpcClient::Pool::fail_lost(const Connection& connection, const std::vector<CallId>& asked,
                                schema::Reply::Reader reply) {
  if (!reply.isProgress()) return;
  std::set<CallId> unanswered;
  for (const auto id : reply.getProgress()) unanswered.insert(id);
  for (const auto id : asked) {
    const auto found = calls_.find(id);
    if (found == calls_.end() || unanswered.count(id) > 0) continue;
    fail(id, {Errc::kLost,
              found->second.what + " on " + to_string(connection.endpoint()) +
                  ": the call or its answer was lost on the way",
              {}});
  }
}

void RpcClient::Pool::arm_deadline_timer() {
  if (deadlines_.empty() || deadlines_.begin()->first >= armed_for_) return;
  armed_for_ = deadlines_.begin()->first;
  deadline_timer_.expires_at(armed_for_);
  deadline_timer_.async_wait([weak = weak_from_this()](error_code cancelled) {
    const auto self = weak.lock();
    if (!cancelled && self) self->on_deadline_timer();
  });
}

void RpcClient::Pool::on_deadline_timer() {
  armed_for_ = TimePoint::max();
  const auto now = Clock::now();
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    const auto id = deadlines_.begin()->second;
    const auto& call = calls_.at(id);
    give_up(id, {Errc::kDeadlineExceeded,
                 call.what + " on " + to_string(call.connection->endpoint()) + " gave no answer in " +
                     millis_text(now - call.started),
                 {}});
  }
  arm_deadline_timer();
}

void RpcClient::Pool::schedule_tick() {
  if (ticking_ || stopped_) return;
  ticking_ = true;
  const auto period =
      std::clamp(std::min(options_.keepalive, options_.idle_timeout) / 8, milliseconds{10}, milliseconds{2'000});
  tick_timer_.expires_after(period);
  tick_timer_.async_wait([weak = weak_from_this()](error_code cancelled) {
    const auto self = weak.lock();
    if (cancelled || !self) return;
    self->ticking_ = false;
    self->tick();
  });
}

void RpcClient::Pool::tick() {
  const auto now = Clock::now();
  std::vector<std::shared_ptr<Connection>> open;
  for (const auto& [endpoint, peer] : peers_) {
    for (const auto& lane : peer.lanes) {
      if (lane) open.push_back(lane);
    }
  }
  for (const auto& connection : open) {
    connection->watch(now);
    if (!connection->closed() && connection->calls_in_flight == 0 && connection->nothing_to_send() &&
        now - connection->idle_since >= options_.idle_timeout) {
      // Taken out first: a call that comes now gets a fresh connection, not this one's end.
      peers_[connection->endpoint()].lanes.at(connection->bulk() ? 1 : 0).reset();
      connection->close(boost::beast::websocket::close_code::normal, "idle");
    }
  }
  forget_idle_peers(now);
  trim_frame_memory(kKeepFrameMemory);
  if (!peers_.empty()) schedule_tick();
}

void RpcClient::Pool::forget_idle_peers(TimePoint now) {
  std::erase_if(peers_, [&](const auto& entry) {
    const Peer& peer = entry.second;
    // The back-off outlives its wait for a while: the next failure must wait longer, not start anew.
    return !peer.lanes[0] && !peer.lanes[1] && now >= peer.retry_at + 2 * options_.max_backoff;
  });
}

void RpcClient::Pool::stop() {
  asio::dispatch(strand_, [self = shared_from_this()] {
    if (std::exchange(self->stopped_, true)) return;
    self->deadline_timer_.cancel();
    self->tick_timer_.cancel();
    std::vector<std::shared_ptr<Connection>> open;
    for (const auto& [endpoint, peer] : self->peers_) {
      for (const auto& lane : peer.lanes) {
        if (lane) open.push_back(lane);
      }
    }
    for (const auto& connection : open) connection->abort({Errc::kCancelled, "this client was stopped", {}});
    self->peers_.clear();
  });
}

}  // namespace dmoe::net
