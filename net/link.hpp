// One WebSocket with one reader, one writer and a watch on whether the peer still lives. Both sides of a connection
// are links; what they do with frames is theirs.
#pragma once

#include "net/error.hpp"
#include "net/frame_budget.hpp"
#include "net/frame_buffer.hpp"
#include "net/outgoing_frame.hpp"
#include "net/received_frame.hpp"
#include "net/shared_socket.hpp"
#include "net/tcp_progress.hpp"

#include <boost/beast/websocket/stream.hpp>

#include <chrono>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace dmoe::net {

using WebSocket = boost::beast::websocket::stream<SharedSocket, /*deflateSupported=*/false>;

struct LinkOptions {
  ReceivedFrame::From peer = ReceivedFrame::From::kClient;
  std::size_t max_frame_bytes = kDefaultMaxFrameBytes;
  std::chrono::milliseconds handshake_timeout{10'000};  ///< Also of the closing handshake.
  std::chrono::milliseconds ping_after{20'000};         ///< Silence after which the peer is pinged.
  std::chrono::milliseconds dead_after{40'000};         ///< Silence after which the peer counts as gone.
  /// Counts the memory of frames that do not fit kFirstPieceBytes. Null: max_frame_bytes alone bounds it.
  std::shared_ptr<FrameBudget> frame_budget;
  std::chrono::milliseconds frame_patience{2'000};  ///< How long a frame waits for memory, unread.
  /// A frame that holds memory gets on by kLeastArrival in each such period, or its peer is dropped.
  std::chrono::milliseconds arrival_timeout{10'000};
};

inline constexpr std::size_t kFirstPieceBytes = 8UL * 1024;  ///< Of a frame, read before anything is known about it.
inline constexpr std::size_t kLeastArrival = 1024UL * 1024;

/// Every method runs on the socket's strand.
class Link : public std::enable_shared_from_this<Link> {
 public:
  Link(TcpSocket socket, const LinkOptions& options);
  virtual ~Link() = default;
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  Strand strand() { return ws_.get_executor(); }

  /// Queues a finished frame. Small neighbours of the same kind leave as one frame.
  void send(OutgoingFramePtr frame);
  /// Closes after what is queued was written. The peer sees `code` and `reason`.
  void close(boost::beast::websocket::close_code code, std::string_view reason);
  /// Closes at once; `on_closed` gets `why`.
  void abort(Error why);
  /// Pings a silent peer, gives up a dead one. To be called a few times per `ping_after`.
  void watch(std::chrono::steady_clock::time_point now);

  std::size_t queued_bytes() const noexcept { return queued_bytes_; }
  bool closed() const noexcept { return closed_; }
  /// After the handshake, and nobody has asked it to close.
  bool is_open() const noexcept { return open_ && !closing_ && !closed_; }
  bool nothing_to_send() const noexcept { return queue_.empty() && !writing_; }

 protected:
  /// A checked frame. Frames sent meanwhile leave together afterwards.
  virtual void on_frame(std::shared_ptr<const ReceivedFrame> frame) = 0;
  /// The last event, once.
  virtual void on_closed(const Error& why) = 0;
  virtual void on_sent(std::size_t /*bytes*/) {}
  /// There was no memory for a frame of these calls; its bytes are thrown away as they come.
  virtual void on_frame_refused(const std::vector<std::uint64_t>& /*calls*/, const Error& /*why*/) {}

  /// After the handshake: reads until closed, writes what is queued.
  void open();
  /// The peer broke the protocol.
  void refuse(const std::string& what);

  WebSocket& websocket() noexcept { return ws_; }
  TcpSocket& socket() noexcept { return ws_.next_layer().next_layer(); }
  /// Takes back frames that have not left yet.
  void discard_queued_if(const std::function<bool(OutgoingFrame&)>& unwanted);
  const LinkOptions& link_options() const noexcept { return options_; }

 private:
  void read();
  void read_piece(std::size_t most);
  void on_read(boost::system::error_code failure, std::size_t bytes);
  void on_read_failed(boost::system::error_code failure);
  void ask_for_memory(std::size_t needed);
  void drop_frame(Error why);
  void on_dropped(std::size_t bytes);
  void answer_dropped();
  void take_frame();
  bool must_pause_reading() const noexcept;
  bool arrives_too_slowly(std::chrono::steady_clock::time_point now);
  void write();
  OutgoingFramePtr next_to_write();
  void on_written(boost::system::error_code failure);
  void start_close();
  void ping();

  WebSocket ws_;
  LinkOptions options_;
  FrameBuffer incoming_;
  struct Dropping {
    Error why;
    bool answered = false;  // Its calls.
  };
  std::optional<Dropping> dropping_;  // The frame that is being read is thrown away.
  std::chrono::steady_clock::time_point arrival_checked_;
  std::size_t arrived_ = 0;             // Of the frame, at that time.
  std::deque<OutgoingFramePtr> queue_;  // Bounded by must_pause_reading on a server, by max_queued_bytes on a client.
  std::size_t queued_bytes_ = 0;
  OutgoingFramePtr current_;  // Being written.
  bool open_ = false;
  bool writing_ = false;
  bool corked_ = false;  // A frame is being handled: hold back what it makes us send.
  bool paused_ = false;
  bool closing_ = false;
  bool close_started_ = false;
  bool closed_ = false;
  bool pinging_ = false;
  boost::beast::websocket::close_reason close_reason_;
  std::chrono::steady_clock::time_point last_sign_;  // Of life.
  TcpProgress progress_;
};

/// What a socket failure means to a caller; `peer` as in "10.0.0.4:7000".
Error link_error(const std::string& peer, const boost::system::error_code& failure);

}  // namespace dmoe::net
