// One connection of a server: plain HTTP until it upgrades, calls after.
#pragma once

#include "net/link.hpp"
#include "net/server_state.hpp"

#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/dynamic_body.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace dmoe::net {

/// Methods run on the session's strand unless they say otherwise.
class Session : public Link {
 public:
  Session(TcpSocket socket, std::shared_ptr<ServerState> server);
  ~Session() override;

  /// Reads the first HTTP request.
  void start();
  /// Drops a peer that takes too long to say what it wants, pings and drops silent ones.
  void tick(std::chrono::steady_clock::time_point now);
  /// Marks calls cancelled and closes once queued replies are written.
  void shut_down();

  const std::string& peer() const noexcept { return peer_; }

  /// Any thread. The reply of a call; null: its caller is gone, only forget it.
  void deliver(std::uint64_t id, OutgoingFramePtr reply);
  std::size_t max_frame_bytes() const noexcept { return server_->options.max_frame_bytes; }
  const ServerCounters& counters() const noexcept { return server_->counters; }

  /// Any thread. Whether closing it would interrupt nothing, and since when.
  bool idle() const noexcept { return idle_; }
  std::chrono::steady_clock::duration::rep idle_since() const noexcept { return idle_since_; }

 protected:
  void on_frame(std::shared_ptr<const ReceivedFrame> frame) override;
  void on_closed(const Error& why) override;
  void on_sent(std::size_t bytes) override;
  void on_frame_refused(const std::vector<std::uint64_t>& calls, const Error& why) override;

 private:
  using Request = boost::beast::http::request<boost::beast::http::string_body>;
  using Response = boost::beast::http::response<boost::beast::http::string_body>;

  // HTTP (session_http.cpp)
  void read_request();
  void on_request(boost::system::error_code failure);
  void handle(Request request);
  void respond(Response response);
  void linger();
  Response answer(const Request& request) const;
  Response refusal(const Request& request) const;
  void upgrade(const Request& request);
  void expect_request_within_timeout();

  // Calls (session_calls.cpp)
  void on_call(const std::shared_ptr<const ReceivedFrame>& frame, schema::Call::Reader call);
  void hand_over(const std::shared_ptr<IncomingCall::State>& state);
  void on_cancel(std::uint64_t id);
  void tell_progress(std::uint64_t id, capnp::List<std::uint64_t>::Reader asked);
  std::optional<Error> reason_to_refuse(schema::Call::Reader call) const;
  void cancel_all();
  void deliver_inbox();
  void finish_call(std::uint64_t id, OutgoingFramePtr reply);
  void update_idle();

  const std::shared_ptr<ServerState> server_;  // Shared: sessions in flight outlive the server object.
  std::string peer_;
  bool admitted_ = false;
  friend struct ServerState;

  boost::beast::flat_buffer http_buffer_;
  std::optional<boost::beast::http::request_parser<boost::beast::http::string_body>> parser_;
  std::optional<Response> response_;
  std::optional<std::chrono::steady_clock::time_point> request_deadline_;
  Request upgrade_request_;

  std::unordered_map<std::uint64_t, std::weak_ptr<IncomingCall::State>> calls_;  // Bounded by the options.
  std::mutex inbox_mutex_;                                                       // Leaf; guards inbox_.
  std::vector<std::pair<std::uint64_t, OutgoingFramePtr>> inbox_;  // Replies made on other threads; bounded as calls_.

  std::atomic<bool> idle_{true};
  std::atomic<std::chrono::steady_clock::duration::rep> idle_since_;
};

/// Shared by the one who answers and the session, which marks it cancelled.
struct IncomingCall::State {
  State(std::shared_ptr<Session> owner, std::shared_ptr<const ReceivedFrame> bytes, schema::Call::Reader call)
      : session(std::move(owner)), frame(std::move(bytes)), reader(call), id(call.getId()) {}

  std::shared_ptr<Session> session;
  std::shared_ptr<const ReceivedFrame> frame;
  schema::Call::Reader reader;
  std::uint64_t id;
  std::chrono::steady_clock::time_point deadline = std::chrono::steady_clock::time_point::max();
  std::atomic<bool> cancelled{false};
  std::atomic<bool> answered{false};

  /// The call whose handler runs on this thread: if it throws, the session answers with what it threw.
  static thread_local const State* in_handler;
};

/// A reply frame with `error`; always fits.
OutgoingFramePtr error_frame(std::uint64_t id, const Error& error);

}  // namespace dmoe::net
