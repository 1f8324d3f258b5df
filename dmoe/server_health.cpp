#include "dmoe/server_health.hpp"

#include "dmoe/failure_log.hpp"
#include "dmoe/lost_calls.hpp"

#include <spdlog/spdlog.h>
#include <boost/asio/steady_timer.hpp>

#include <atomic>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace dmoe {
namespace {

using Clock = std::chrono::steady_clock;
using ServerPtr = std::shared_ptr<const dht::ServerAddress>;

constexpr int kMaxRounds = 8;  ///< By then the server's record has run out, or it announced itself again.
constexpr int kQuestions = 3;  ///< Of a round: answers to questions get lost as well.

/// A line in a log must say whether somebody has to act.
const char* what_to_do(Errc code) {
  switch (code) {
    case Errc::kInvalidArgument: return "check the options of the layer that called it";
    case Errc::kUnauthorized: return "this trainer is not allowed there: use other experts, or ask its owner";
    default: return "others take over, nothing to do here";
  }
}

}  // namespace

class ServerHealth::State : public std::enable_shared_from_this<State> {
 public:
  State(boost::asio::io_context& io, net::RpcClient& rpc, std::shared_ptr<gating::BanList> bans)
      : io_(io), rpc_(rpc), bans_(std::move(bans)) {}

  net::Endpoint endpoint_of(const dht::ServerAddress& server) {
    if (quiet_.load(std::memory_order_acquire)) return server.endpoints.front();
    const std::lock_guard lock(mutex_);
    const auto it = servers_.find(server.peer);
    return server.endpoints[it == servers_.end() ? 0 : it->second.endpoint % server.endpoints.size()];
  }

  void answered(const ExpertUid& uid, const dht::ServerAddress& server) {
    if (quiet_.load(std::memory_order_acquire)) return;
    const std::lock_guard lock(mutex_);
    lost_calls_.answered(uid, server.peer);
    lost_calls_.answered({}, server.peer);
    const auto it = servers_.find(server.peer);
    if (it == servers_.end()) return;
    it->second.unreachable = 0;
    it->second.heard = Clock::now();
  }

  bool heard_since(const dht::ServerAddress& server, Clock::time_point time) {
    if (quiet_.load(std::memory_order_acquire)) return false;
    const std::lock_guard lock(mutex_);
    const auto it = servers_.find(server.peer);
    return it != servers_.end() && it->second.heard >= time;
  }

  void failed(const ExpertUid& uid, const ServerPtr& server, const net::Endpoint& endpoint, const Error& error) {
    log(*server, to_string(uid) + ": " + describe(error) + "; " + what_to_do(error.code));
    if (!gating::deserves_ban(error.code)) return;
    if (error.code == Errc::kUnavailable) return unreachable(uid, server, endpoint);
    if (error.code == Errc::kDeadlineExceeded && !is_stuck(uid, *server, true)) return;
    std::optional<std::chrono::milliseconds> time;
    if (error.code == Errc::kOverloaded) time = error.retry_after.value_or(std::chrono::milliseconds(1'000));
    bans_->ban_expert(uid, *server, Clock::now(), time);
  }

  void overtaken(const ExpertUid& uid, const ServerPtr& server, bool alone) {
    if (alone) {
      if (is_stuck({}, *server, false)) leave_out_silent(uid, server);
    } else if (is_stuck(uid, *server, false)) {
      log(*server, to_string(uid) + ": answers no longer; " + what_to_do(Errc::kDeadlineExceeded));
      bans_->ban_expert(uid, *server, Clock::now(), {});
    }
  }

  void silent(const ExpertUid& uid, const ServerPtr& server) {
    bans_->ban_server(*server, Clock::now());
    std::uint64_t number = 0;
    {
      const std::lock_guard lock(mutex_);
      quiet_.store(false, std::memory_order_release);
      if (!lost_calls_.silent(server->peer, Clock::now())) {
        Record& record = record_of(*server);
        if (record.asking || stopped_) return;
        record.asking = true;
        number = record.watch = ++watches_;  // Instead of one that waits for a later moment to ask.
      }
    }
    if (number == 0) return leave_out_silent(uid, server);
    ask({uid, server, number, /*suspected=*/true, kMaxRounds, kQuestions});
  }

  const std::shared_ptr<gating::BanList>& bans() const noexcept { return bans_; }

  void stop() {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    for (auto& [peer, record] : servers_) record.watch = 0;
  }

 private:
  struct Record {
    std::size_t endpoint = 0;     ///< Index, modulo the number of endpoints.
    std::size_t unreachable = 0;  ///< Endpoints that failed in a row.
    Clock::time_point heard;      ///< When it last answered anything; the epoch: not since it first failed.
    std::uint64_t watch = 0;      ///< Of the watch over it; 0: none.
    bool asking = false;          ///< A question is out.
  };

  /// What keeps asking a server that was left out.
  struct Watch {
    ExpertUid uid;  ///< To ask about.
    ServerPtr server;
    std::uint64_t number;
    bool suspected;  ///< Nothing but lost calls speaks against it yet.
    int rounds;      ///< Left, this one included.
    int questions;   ///< Left of this round.
  };

  void unreachable(const ExpertUid& uid, const ServerPtr& server, const net::Endpoint& endpoint) {
    {
      const std::lock_guard lock(mutex_);
      Record& record = record_of(*server);
      const auto& current = server->endpoints[record.endpoint % server->endpoints.size()];
      if (endpoint != current) return;  // An older call; the next endpoint has its chance.
      ++record.endpoint;
      if (++record.unreachable < server->endpoints.size()) return;
    }
    ban(uid, server);
  }

  bool is_stuck(const ExpertUid& uid, const dht::ServerAddress& server, bool waited_long) {
    const std::lock_guard lock(mutex_);
    quiet_.store(false, std::memory_order_release);
    return lost_calls_.lost(uid, server.peer, waited_long, Clock::now());
  }

  void leave_out_silent(const ExpertUid& uid, const ServerPtr& server) {
    log_silence(*server);
    ban(uid, server);
  }

  void log_silence(const dht::ServerAddress& server) {
    log(server, "no answer to any call; its experts are left out until it shows up again, nothing to do here");
  }

  /// Without a question first.
  void ban(const ExpertUid& uid, const ServerPtr& server) {
    bans_->ban_server(*server, Clock::now());
    Watch watch{uid, server, 0, /*suspected=*/false, kMaxRounds, kQuestions};
    {
      const std::lock_guard lock(mutex_);
      Record& record = record_of(*server);
      record.unreachable = 0;
      if ((record.watch != 0 && !record.asking) || stopped_) return;
      record.asking = false;  // Its answer would come too late: calls have told.
      watch.number = record.watch = ++watches_;
    }
    wait(std::move(watch));
  }

  void wait(Watch watch) {
    const auto timer = std::make_shared<boost::asio::steady_timer>(io_);
    timer->expires_after(bans_->ban_time() * 8 / 10);
    timer->async_wait([weak = weak_from_this(), timer, watch](const boost::system::error_code& error) {
      const auto self = weak.lock();
      if (!self || error) return;
      {
        const std::lock_guard lock(self->mutex_);
        Record& record = self->record_of(*watch.server);
        if (record.watch != watch.number) return;
        record.asking = true;
      }
      self->ask(watch);
    });
  }

  /// A live server answers at once, whatever its experts are busy with.
  void ask(const Watch& watch) {
    net::CallSpec call;
    call.fill = [text = to_string(watch.uid)](net::schema::Call::Builder builder, net::Attachments&) {
      builder.initInfo().setUid(text);
    };
    call.deadline = Clock::now() + bans_->ban_time() * 15 / 100 / kQuestions;
    call.on_reply = [weak = weak_from_this(), watch](Result<net::IncomingReply> reply) {
      if (const auto self = weak.lock()) self->asked(watch, reply);
    };
    std::vector<net::CallSpec> calls;
    calls.push_back(std::move(call));
    rpc_.start(endpoint_of(*watch.server), std::move(calls));
  }

  void asked(Watch watch, const Result<net::IncomingReply>& reply) {
    const Errc failure = reply.has_error() ? reply.error().code : Errc::kInternal;
    // Any other error was sent by a live server.
    const bool absent =
        failure == Errc::kUnavailable || failure == Errc::kDeadlineExceeded || failure == Errc::kCancelled;
    // What refused a moment ago refuses again, unless it has another address.
    const bool ask_again =
        absent && watch.questions > 1 && (failure == Errc::kDeadlineExceeded || watch.server->endpoints.size() > 1);
    {
      const std::lock_guard lock(mutex_);
      Record& record = record_of(*watch.server);
      if (record.watch != watch.number) return;
      record.asking = ask_again;
      if (absent) {
        ++record.endpoint;
      } else {
        record.heard = Clock::now();
      }
      if (!absent || (!ask_again && watch.rounds == 1)) record.watch = 0;
    }
    if (!absent) {
      bans_->lift_server(watch.server->peer);
      if (!watch.suspected) bans_->lift_experts(watch.server->peer);  // Whatever they did was a while ago.
    } else if (ask_again) {
      --watch.questions;
      ask(watch);
    } else if (--watch.rounds > 0) {
      if (std::exchange(watch.suspected, false)) log_silence(*watch.server);
      bans_->ban_server(*watch.server, Clock::now());
      watch.questions = kQuestions;
      wait(std::move(watch));
    }
  }

  Record& record_of(const dht::ServerAddress& server) {
    quiet_.store(false, std::memory_order_release);
    return servers_[server.peer];
  }

  void log(const dht::ServerAddress& server, const std::string& text) {
    std::optional<std::string> line;
    {
      const std::lock_guard lock(mutex_);
      line = log_.line(server.peer, text, Clock::now());
    }
    if (line) {
      spdlog::warn("server {} at {}: {}", net::short_string(server.peer), to_string(server.endpoints.front()), *line);
    }
  }

  boost::asio::io_context& io_;
  net::RpcClient& rpc_;
  const std::shared_ptr<gating::BanList> bans_;  // Shared with the beam searches.
  std::atomic<bool> quiet_{true};                // Nothing failed yet: no need for the lock.
  std::mutex mutex_;
  std::unordered_map<net::PeerId, Record> servers_;  // Guarded by mutex_. Grows with servers that ever failed.
  LostCalls lost_calls_;                             // Guarded by mutex_.
  FailureLog log_;                                   // Guarded by mutex_.
  std::uint64_t watches_ = 0;                        // Guarded by mutex_.
  bool stopped_ = false;                             // Guarded by mutex_.
};

ServerHealth::ServerHealth(boost::asio::io_context& io, net::RpcClient& rpc, std::shared_ptr<gating::BanList> bans)
    : state_(std::make_shared<State>(io, rpc, std::move(bans))) {}

ServerHealth::~ServerHealth() { state_->stop(); }

net::Endpoint ServerHealth::endpoint_of(const dht::ServerAddress& server) const { return state_->endpoint_of(server); }
void ServerHealth::answered(const ExpertUid& uid, const dht::ServerAddress& server) { state_->answered(uid, server); }

void ServerHealth::failed(const ExpertUid& uid, const ServerPtr& server, const net::Endpoint& endpoint,
                          const Error& error) {
  state_->failed(uid, server, endpoint, error);
}

void ServerHealth::overtaken(const ExpertUid& uid, const ServerPtr& server, bool alone) {
  state_->overtaken(uid, server, alone);
}

bool ServerHealth::heard_since(const dht::ServerAddress& server, Clock::time_point time) const {
  return state_->heard_since(server, time);
}

void ServerHealth::silent(const ExpertUid& uid, const ServerPtr& server) { state_->silent(uid, server); }
const std::shared_ptr<gating::BanList>& ServerHealth::bans() const noexcept { return state_->bans(); }

}  // namespace dmoe
