// The client behind RpcClient: calls in flight, their deadlines, and two connections per endpoint.
#pragma once

#include "net/connection.hpp"
#include "net/rpc_client.hpp"

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace dmoe::net {

/// Methods run on the strand unless they say otherwise.
class RpcClient::Pool : public ConnectionOwner, public std::enable_shared_from_this<Pool> {
 public:
  Pool(const Strand& strand, RpcClientOptions options);

  // Any thread.
  std::vector<CallId> start(const Endpoint& endpoint, std::vector<CallSpec> calls);
  CallId start_as(CallId id, const Endpoint& endpoint, CallSpec call);
  CallId new_id() noexcept { return next_id_.fetch_add(1, std::memory_order_relaxed); }
  void cancel(CallId id);
  void check(std::vector<CallId> ids);
  void stop();

  void on_open(Connection& connection) override;
  void on_replies(Connection& connection, std::shared_ptr<const ReceivedFrame> frame) override;
  void on_gone(Connection& connection, bool dialled, const Error& why) override;

 private:
  using TimePoint = std::chrono::steady_clock::time_point;
  using OnReply = std::function<void(Result<IncomingReply>)>;

  struct Pending {
    OnReply on_reply;
    TimePoint deadline;
    TimePoint started;
    std::string what;                        ///< "forward ffn.3.7", for errors.
    std::shared_ptr<Connection> connection;  ///< Null until the call is handed to one.
  };

  /// Calls on their way from the caller's thread to the strand.
  struct Submission {
    Endpoint endpoint;
    std::vector<std::pair<CallId, Pending>> calls;
    OutgoingFramePtr frame;
    std::optional<Error> failure;  ///< Why `frame` is missing.
  };

  struct Peer {
    std::array<std::shared_ptr<Connection>, 2> lanes;  ///< Control, bulk. Null: not connected.
    std::chrono::milliseconds backoff{0};
    TimePoint retry_at;
    std::string failure;
  };

  // Any thread.
  Submission submit(const Endpoint& endpoint, const std::vector<CallId>& ids, std::vector<CallSpec> calls) const;
  void enqueue(Submission submission);

  void take_inbox();
  void accept(Submission submission);
  Result<std::shared_ptr<Connection>> connection_for(const Endpoint& endpoint, std::size_t bytes);
  std::shared_ptr<Connection> dial(const Endpoint& endpoint, bool bulk);
  void note_failed_dial(Peer& peer, const Error& why);

  void add(CallId id, Pending call);
  std::optional<Pending> take(CallId id);
  void fail(CallId id, Error error);
  void fail_later(std::vector<std::pair<CallId, Pending>> calls, const Error& error);
  void give_up(CallId id, Error error);
  void send_cancel(Connection& connection, CallId id);
  void ask_progress(const std::shared_ptr<Connection>& connection, std::vector<CallId> ids);
  void fail_lost(const Connection& connection, const std::vector<CallId>& asked, schema::Reply::Reader reply);

  void arm_deadline_timer();
  void on_deadline_timer();
  void schedule_tick();
  void tick();
  void forget_idle_peers(TimePoint now);

  const Strand strand_;
  const RpcClientOptions options_;
  std::atomic<CallId> next_id_{1};

  std::mutex inbox_mutex_;  // Leaf; guards inbox_.
  std::vector<Submission> inbox_;

  std::unordered_map<Endpoint, Peer> peers_;
  std::unordered_map<CallId, Pending> calls_;
  std::set<std::pair<TimePoint, CallId>> deadlines_;
  StrandTimer deadline_timer_;
  TimePoint armed_for_ = TimePoint::max();
  StrandTimer tick_timer_;
  bool ticking_ = false;
  bool stopped_ = false;
  std::minstd_rand random_;  // Jitter only.
};

}  // namespace dmoe::net
