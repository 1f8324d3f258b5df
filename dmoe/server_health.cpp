#include "dmoe/server_health.hpp"

#include "dmoe/failure_log.hpp"
#include "dmoe/lost_calls.hpp"

#include <spdlog/spdlog.h>
#include <boost/asio/steady_timer.hpp>

#include <atomic>
#include <mutex>
#include <unordered_map>

namespace dmoe {
namespace {

using Clock = std::chrono::steady_clock;
using ServerPtr = std::shared_ptr<const dht::ServerAddress>;

constexpr int kMaxProbes = 8;  ///< By then the server's record has run out, or it announced itself again.

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
    if (it != servers_.end()) it->second.unreachable = 0;
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
      if (is_stuck({}, *server, false)) silent(uid, server);
    } else if (is_stuck(uid, *server, false)) {
      log(*server, to_string(uid) + ": answers no longer; " + what_to_do(Errc::kDeadlineExceeded));
      bans_->ban_expert(uid, *server, Clock::now(), {});
    }
  }

  void silent(const ExpertUid& uid, const ServerPtr& server) {
    log(*server, "no answer to any call; its experts are left out until it shows up again, nothing to do here");
    ban(uid, server);
  }

  const std::shared_ptr<gating::BanList>& bans() const noexcept { return bans_; }

  void stop() {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    for (auto& [peer, record] : servers_) record.timer.reset();
  }

 private:
  struct Record {
    std::size_t endpoint = 0;                          ///< Index, modulo the number of endpoints.
    std::size_t unreachable = 0;                       ///< Endpoints that failed in a row.
    std::shared_ptr<boost::asio::steady_timer> timer;  ///< Set while probing. Shared with its handler.
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

  void ban(const ExpertUid& uid, const ServerPtr& server) {
    bans_->ban_server(*server, Clock::now());
    const std::lock_guard lock(mutex_);
    Record& record = record_of(*server);
    record.unreachable = 0;
    if (record.timer || stopped_) return;
    record.timer = std::make_shared<boost::asio::steady_timer>(io_);
    wait(record.timer, uid, server, kMaxProbes);
  }

  void wait(const std::shared_ptr<boost::asio::steady_timer>& timer, const ExpertUid& uid, const ServerPtr& server,
            int probes) {
    timer->expires_after(bans_->ban_time() * 8 / 10);
    timer->async_wait([weak = weak_from_this(), timer, uid, server, probes](const boost::system::error_code& error) {
      const auto self = weak.lock();
      if (self && !error) self->probe(uid, server, probes);
    });
  }

  void probe(const ExpertUid& uid, const ServerPtr& server, int probes) {
    net::CallSpec call;
    call.fill = [text = to_string(uid)](net::schema::Call::Builder builder, net::Attachments&) {
      builder.initInfo().setUid(text);
    };
    call.deadline = Clock::now() + bans_->ban_time() * 15 / 100;
    call.on_reply = [weak = weak_from_this(), uid, server, probes](Result<net::IncomingReply> reply) {
      if (const auto self = weak.lock()) self->probed(uid, server, probes, reply);
    };
    std::vector<net::CallSpec> calls;
    calls.push_back(std::move(call));
    rpc_.start(endpoint_of(*server), std::move(calls));
  }

  void probed(const ExpertUid& uid, const ServerPtr& server, int probes, const Result<net::IncomingReply>& reply) {
    // Any other error was sent by a live server.
    const bool absent =
        reply.has_error() && (reply.error().code == Errc::kUnavailable ||
                              reply.error().code == Errc::kDeadlineExceeded || reply.error().code == Errc::kCancelled);
    if (!absent) bans_->lift_server(server->peer);
    const std::lock_guard lock(mutex_);
    Record& record = record_of(*server);
    if (absent && probes > 1 && record.timer && !stopped_) {
      if (reply.error().code == Errc::kUnavailable) ++record.endpoint;
      bans_->ban_server(*server, Clock::now());
      wait(record.timer, uid, server, probes - 1);
    } else {
      record.timer.reset();
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

void ServerHealth::silent(const ExpertUid& uid, const ServerPtr& server) { state_->silent(uid, server); }
const std::shared_ptr<gating::BanList>& ServerHealth::bans() const noexcept { return state_->bans(); }

}  // namespace dmoe
