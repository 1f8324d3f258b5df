#include "net/link.hpp"

#include "net/frame_lease.hpp"

#include <boost/beast/websocket/rfc6455.hpp>
#include <boost/beast/websocket/stream_base.hpp>

#include <algorithm>
#include <new>
#include <utility>

namespace dmoe::net {
namespace {

namespace asio = boost::asio;
namespace websocket = boost::beast::websocket;
using boost::system::error_code;

/// Read at a time: what was read is unmasked before it leaves the second-level cache.
constexpr std::size_t kPieceBytes = 256UL * 1024;
constexpr std::size_t kMaxQueuedFrames = 8'192;  ///< A peer that asks and does not read is not read either.

websocket::stream_base::timeout beast_timeouts(const LinkOptions& options) {
  // Idle time is watched here (see watch): Beast's own timer would cut a large, slow, healthy write.
  return {options.handshake_timeout, websocket::stream_base::none(), /*keep_alive_pings=*/false};
}

}  // namespace

Link::Link(TcpSocket socket, const LinkOptions& options)
    : ws_(std::move(socket)),
      options_(options),
      incoming_(options.max_frame_bytes),
      last_sign_(std::chrono::steady_clock::now()) {
  ws_.set_option(beast_timeouts(options_));
  ws_.read_message_max(options_.max_frame_bytes);
  ws_.secure_prng(false);  // Masking protects old proxies from browsers' scripts; there is no secret in it.
}

void Link::open() {
  if (closed_) return;
  open_ = true;
  last_sign_ = std::chrono::steady_clock::now();
  read();
  write();
}

void Link::read() {
  if (closed_) return;
  paused_ = must_pause_reading();
  if (!paused_) read_piece(kFirstPieceBytes);
}

void Link::read_piece(std::size_t most) {
  asio::mutable_buffer room;
  try {
    room = incoming_.prepare(std::min(most, incoming_.max_size() - incoming_.size()));
  } catch (const std::bad_alloc&) {
    if (incoming_.capacity() == 0) return abort({Errc::kOverloaded, "no memory for a frame", {}});
    return drop_frame({Errc::kOverloaded, "this machine has no memory for a frame of this size", {}});
  }
  ws_.async_read_some(
      asio::buffer(room, kPieceBytes),
      [self = shared_from_this()](error_code failure, std::size_t bytes) { self->on_read(failure, bytes); });
}

bool Link::must_pause_reading() const noexcept {
  // Never on a client: what it reads makes no work, and if both sides waited for the other to read, neither would.
  if (options_.peer == ReceivedFrame::From::kServer) return false;
  return queue_.size() > kMaxQueuedFrames || queued_bytes_ > options_.max_frame_bytes;
}

void Link::on_read(error_code failure, std::size_t bytes) {
  if (closed_) return;
  if (failure) return on_read_failed(failure);
  if (dropping_) return on_dropped(bytes);
  incoming_.commit(bytes);
  if (ws_.is_message_done()) return take_frame();
  if (incoming_.size() == incoming_.max_size()) return on_read_failed(websocket::error::message_too_big);
  const auto rest = std::min(ws_.read_size_hint(kFirstPieceBytes), incoming_.max_size() - incoming_.size());
  if (options_.frame_budget && incoming_.size() + rest > incoming_.capacity()) {
    return ask_for_memory(incoming_.size() + rest);
  }
  read_piece(rest);
}

void Link::on_read_failed(error_code failure) {
  if (failure == websocket::error::message_too_big) {
    return refuse("a frame over the limit of " + std::to_string(options_.max_frame_bytes) + " bytes (max_frame_bytes)");
  }
  if (failure == websocket::error::closed && ws_.reason().reason.size() > 0) {
    const auto& reason = ws_.reason().reason;
    return abort(
        {Errc::kUnavailable, "the peer closed the connection: " + std::string(reason.data(), reason.size()), {}});
  }
  abort(link_error("", failure));
}

/// Nothing more is read meanwhile: the sender's socket fills, and it waits too.
void Link::ask_for_memory(std::size_t needed) {
  take_lease(strand(), options_.frame_budget, needed, options_.frame_patience,
             [self = shared_from_this(), needed](Result<FrameBudget::Lease> lease) {
               if (self->closed_) return;
               if (lease.has_error()) return self->drop_frame(lease.error());
               self->incoming_.hold(std::move(*lease));
               self->arrival_checked_ = std::chrono::steady_clock::now();
               self->arrived_ = self->incoming_.size();
               self->read_piece(needed - self->incoming_.size());
             });
}

void Link::drop_frame(Error why) {
  dropping_ = Dropping{std::move(why)};
  on_dropped(0);
}

/// The beginning is kept until it is clear whose calls they were; the rest is overwritten.
void Link::on_dropped(std::size_t bytes) {
  const bool done = ws_.is_message_done();
  if (!dropping_->answered) {
    incoming_.commit(bytes);
    if (done || incoming_.size() == incoming_.capacity()) answer_dropped();
    if (closing_) return;
  }
  if (!done) return read_piece(incoming_.capacity() > 0 ? incoming_.capacity() - incoming_.size() : kFirstPieceBytes);
  dropping_.reset();
  read();
}

void Link::answer_dropped() {
  dropping_->answered = true;
  const auto calls = call_ids_in(incoming_);
  incoming_ = FrameBuffer(options_.max_frame_bytes);
  if (calls) return on_frame_refused(*calls, dropping_->why);
  close(websocket::close_code::try_again_later, "no memory for a frame");
}

void Link::take_frame() {
  auto frame = ReceivedFrame::parse(std::exchange(incoming_, FrameBuffer(options_.max_frame_bytes)), options_.peer);
  if (!ws_.got_binary()) return refuse("a text frame");
  if (frame.has_error()) return refuse(frame.error().message);
  if (!closing_) {
    corked_ = true;
    on_frame(std::move(*frame));
    corked_ = false;
  }
  write();
  read();
}

void Link::refuse(const std::string& what) {
  queue_.clear();
  queued_bytes_ = 0;
  // RFC 6455 §5.5: a control frame carries at most 125 bytes, 2 of them the code.
  constexpr std::size_t kLongestReason = 123;
  auto reason = what.substr(0, kLongestReason);
  // It must be UTF-8, and Cap'n Proto quotes the peer's own bytes.
  std::replace_if(
      reason.begin(), reason.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  close(websocket::close_code::protocol_error, reason);
}

void Link::send(OutgoingFramePtr frame) {
  if (closed_ || closing_) return;
  queued_bytes_ += frame->size();
  queue_.push_back(std::move(frame));
  write();
}

void Link::discard_queued_if(const std::function<bool(OutgoingFrame&)>& unwanted) {
  std::erase_if(queue_, [&](const OutgoingFramePtr& frame) {
    if (!unwanted(*frame)) return false;
    queued_bytes_ -= frame->size();
    return true;
  });
}

void Link::write() {
  if (!open_ || writing_ || corked_ || closed_) return;
  if (queue_.empty()) {
    if (closing_) start_close();
    return;
  }
  writing_ = true;
  current_ = next_to_write();
  ws_.next_layer().async_write_some(
      current_->websocket_message(/*masked=*/options_.peer == ReceivedFrame::From::kServer),
      [self = shared_from_this()](error_code failure, std::size_t) { self->on_written(failure); });
}

OutgoingFramePtr Link::next_to_write() {
  std::size_t count = 0;
  std::size_t bytes = 0;
  const auto kind = queue_.front()->root().which();
  while (count < queue_.size() && queue_[count]->size() <= kMergeBytes && bytes < kMergedBytes &&
         queue_[count]->root().which() == kind) {
    bytes += queue_[count++]->size();
  }
  if (bytes > options_.max_frame_bytes) count = 1;  // Only with a cap below kMergedBytes.
  if (count <= 1) {
    OutgoingFramePtr frame = std::move(queue_.front());
    queue_.pop_front();
    queued_bytes_ -= frame->size();
    return frame;
  }
  const auto end = queue_.begin() + static_cast<std::ptrdiff_t>(count);
  const std::vector<OutgoingFramePtr> frames(std::make_move_iterator(queue_.begin()), std::make_move_iterator(end));
  queue_.erase(queue_.begin(), end);
  queued_bytes_ -= bytes;
  return merge(frames);
}

void Link::on_written(error_code failure) {
  writing_ = false;
  const std::size_t bytes = std::exchange(current_, nullptr)->size();
  if (closed_) return;
  if (failure) return abort(link_error("", failure));
  on_sent(bytes);
  write();
  if (paused_) read();
}

void Link::close(websocket::close_code code, std::string_view reason) {
  if (closed_ || closing_) return;
  closing_ = true;
  close_reason_ = websocket::close_reason(code);
  close_reason_.reason.assign(reason.data(), reason.size());
  if (!open_) return abort({Errc::kUnavailable, std::string(reason), {}});
  corked_ = false;
  write();
}

void Link::start_close() {
  if (std::exchange(close_started_, true)) return;
  ws_.async_close(close_reason_, [self = shared_from_this()](error_code) {
    const auto& reason = self->close_reason_.reason;
    self->abort({Errc::kUnavailable, "the connection was closed: " + std::string(reason.data(), reason.size()), {}});
  });
}

void Link::abort(Error why) {
  if (std::exchange(closed_, true)) return;
  error_code ignored;
  socket().close(ignored);
  queue_.clear();
  queued_bytes_ = 0;
  on_closed(why);
}

void Link::watch(std::chrono::steady_clock::time_point now) {
  if (closed_ || !open_) return;
  const auto progress = tcp_progress(socket().native_handle());
  if (!progress) return;
  const bool heard = progress->received != progress_.received;
  const bool flows = writing_ && progress->acknowledged != progress_.acknowledged;
  progress_ = *progress;
  if (heard || flows) last_sign_ = now;
  if (arrives_too_slowly(now)) {
    return abort({Errc::kUnavailable, "a frame arrived too slowly for the memory that it holds", {}});
  }
  const auto silence = now - last_sign_;
  if (silence >= options_.dead_after) {
    const auto text = std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(silence).count());
    abort({Errc::kUnavailable, "the peer gave no sign of life for " + text + " ms", {}});
  } else if (silence >= options_.ping_after) {
    ping();
  }
}

bool Link::arrives_too_slowly(std::chrono::steady_clock::time_point now) {
  if (!incoming_.counted() || now - arrival_checked_ < options_.arrival_timeout) return false;
  arrival_checked_ = now;
  return incoming_.size() < std::exchange(arrived_, incoming_.size()) + kLeastArrival;
}

void Link::ping() {
  if (writing_ || closing_ || std::exchange(pinging_, true)) return;
  ws_.async_ping({}, [self = shared_from_this()](error_code) { self->pinging_ = false; });
}

Error link_error(const std::string& peer, const error_code& failure) {
  const std::string with = peer.empty() ? "the peer" : peer;
  if (failure == websocket::error::closed || failure == boost::asio::error::eof) {
    return {Errc::kUnavailable, with + " closed the connection", {}};
  }
  return {Errc::kUnavailable, "the connection to " + with + " failed: " + failure.message(), {}};
}

}  // namespace dmoe::net
