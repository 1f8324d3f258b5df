#include "dmoe/server_formats.hpp"

#include "net/identity.hpp"

#include <chrono>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace dmoe {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kQuestionTimeout{5};
constexpr std::chrono::minutes kAskAgain{10};
constexpr std::size_t kMostServers = 16'384;  ///< Known at a time; then all are asked anew.

unsigned bit_of(Compression compression) noexcept { return 1U << static_cast<unsigned>(compression); }

unsigned accepted_by(const Result<net::IncomingReply>& reply) {
  unsigned accepted = bit_of(Compression::kNone);
  if (reply.has_error() || !reply->reader().isInfo()) return accepted;
  for (const auto offered : reply->reader().getInfo().getCompressions()) {
    if (const auto known = net::from_wire(offered); known.has_value()) accepted |= bit_of(*known);
  }
  return accepted;
}

}  // namespace

class ServerFormats::State {
 public:
  /// The accepted set, and whether the caller is to ask.
  std::pair<unsigned, bool> look_up(const net::PeerId& server) {
    const auto now = Clock::now();
    const std::lock_guard lock(mutex_);
    if (servers_.size() > kMostServers) servers_.clear();
    auto& entry = servers_[server];
    const bool ask = now >= entry.ask_at;
    if (ask) entry.ask_at = now + 2 * kQuestionTimeout;  // Nobody else asks meanwhile.
    return {entry.accepted, ask};
  }

  void answered(const net::PeerId& server, const Result<net::IncomingReply>& reply) {
    const unsigned accepted = accepted_by(reply);
    const std::lock_guard lock(mutex_);
    auto& entry = servers_[server];
    entry.accepted = accepted;
    entry.ask_at = Clock::now() + (reply.has_error() ? Clock::duration(kQuestionTimeout) : Clock::duration(kAskAgain));
  }

 private:
  struct Entry {
    unsigned accepted = bit_of(Compression::kNone);
    Clock::time_point ask_at;  ///< The epoch: never asked.
  };
  std::mutex mutex_;  // Leaf; guards servers_.
  std::unordered_map<net::PeerId, Entry> servers_;
};

ServerFormats::ServerFormats(net::RpcClient& rpc) : rpc_(rpc), state_(std::make_shared<State>()) {}

Compression ServerFormats::choose(const ExpertUid& uid, const dht::ServerAddress& server, const net::Endpoint& endpoint,
                                  Compression wanted) {
  if (wanted == Compression::kNone) return wanted;
  const auto [accepted, ask] = state_->look_up(server.peer);
  if (ask) {
    net::CallSpec question;
    question.fill = [&uid](net::schema::Call::Builder builder, net::Attachments&) {
      builder.initInfo().setUid(to_string(uid));
    };
    question.deadline = Clock::now() + kQuestionTimeout;
    question.on_reply = [weak = std::weak_ptr(state_), peer = server.peer](const Result<net::IncomingReply>& reply) {
      if (const auto state = weak.lock()) state->answered(peer, reply);
    };
    std::vector<net::CallSpec> calls;
    calls.push_back(std::move(question));
    rpc_.start(endpoint, std::move(calls));
  }
  return (accepted & bit_of(wanted)) != 0 ? wanted : Compression::kNone;
}

}  // namespace dmoe
