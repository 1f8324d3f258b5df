#include "dht/bootstrap.hpp"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

namespace dmoe::dht {
namespace {

using namespace std::chrono_literals;

constexpr Duration kFirstPause = 2s;
constexpr Duration kLongestPause = 15s;
constexpr Duration kContactedPause = 60s;  // Names may change their addresses while all is well.

}  // namespace

Bootstrap::Bootstrap(Node& node, std::shared_ptr<Clock> clock, Resolve resolve, Accepts accepts,
                     std::vector<net::Endpoint> peers, std::chrono::milliseconds timeout)
    : node_(node),
      clock_(std::move(clock)),
      resolve_(std::move(resolve)),
      accepts_(accepts),
      peers_(std::move(peers)),
      timeout_(timeout),
      pause_(kFirstPause) {}

void Bootstrap::start(Handler handler) {
  handler_ = std::move(handler);
  if (peers_.empty()) return finish({});
  clock_->schedule(clock_->now() + timeout_, [self = shared_from_this()] { self->on_timeout(); });
  resolve_all();
}

/// A node with initial peers makes its first lookups wait for contact. Now that there is none, it must not: it may be
/// alone for days. So the peers are taken from it, and are pinged here until one answers.
void Bootstrap::on_timeout() {
  if (stopped_ || contacted_) return;
  alone_ = true;
  join_through({});
  finish(Error{Errc::kUnavailable,
               "no initial peer answered within " + std::to_string(timeout_.count()) + " ms: " + reasons(),
               {}});
}

void Bootstrap::join_through(std::vector<Address> peers) {
  node_.bootstrap(
      std::move(peers), [self = shared_from_this()] { self->on_contact(); },
      [self = shared_from_this()](const Address& elsewhere) { self->on_conflict(elsewhere); });
}

void Bootstrap::stop() {
  stopped_ = true;
  finish(Error{Errc::kCancelled, "the DHT service has stopped", {}});
}

void Bootstrap::resolve_all() {
  if (stopped_) return;
  addresses_.clear();
  resolving_ = peers_.size();
  for (const net::Endpoint& peer : peers_) {
    resolve_(peer, [self = shared_from_this(), peer](const Result<std::vector<Address>>& found) {
      self->on_resolved(peer, found);
    });
  }
}

void Bootstrap::on_resolved(const net::Endpoint& peer, const Result<std::vector<Address>>& found) {
  if (stopped_) return;
  if (found.has_value()) {
    for (const Address& address : *found) take(peer, address);
  } else {
    reasons_[peer] = found.error().message;
  }
  one_less();
}

void Bootstrap::take(const net::Endpoint& peer, const Address& address) {
  const bool reachable = address.is_v4() ? accepts_.v4 : accepts_.v6;
  if (!reachable) {
    reasons_.try_emplace(
        peer, std::string(address.is_v4() ? "IPv4" : "IPv6") + " address, but this node listens on the other kind");
    return;
  }
  reasons_[peer] = "no answer";
  if (std::find(addresses_.begin(), addresses_.end(), address) == addresses_.end()) addresses_.push_back(address);
}

void Bootstrap::one_less() {
  if (--resolving_ != 0) return;
  if (alone_) {
    // An answer is a contact, whoever asked.
    for (const Address& address : addresses_) node_.ping(address, [](const Result<PingReport>&) {});
  } else {
    join_through(addresses_);
  }
  const Duration pause = contacted_ ? kContactedPause : std::exchange(pause_, std::min(pause_ * 2, kLongestPause));
  clock_->schedule(clock_->now() + pause, [self = shared_from_this()] { self->resolve_all(); });
}

void Bootstrap::on_contact() {
  if (stopped_) return;
  contacted_ = true;
  if (std::exchange(alone_, false)) join_through(addresses_);
  finish({});
}

void Bootstrap::on_conflict(const Address& elsewhere) {
  if (stopped_) return;
  const std::string message = "identity " + net::short_string(node_.id()) + " is already in use at " +
                              to_string(elsewhere) + ": give this node a key of its own (dmoe keygen)";
  if (!std::exchange(conflict_told_, true)) spdlog::error("dht: {}", message);
  finish(Error{Errc::kUnavailable, message, {}});
}

std::string Bootstrap::reasons() const {
  std::string all;
  for (const auto& [peer, reason] : reasons_) {
    all += (all.empty() ? "" : "; ") + net::to_string(peer) + ": " + reason;
  }
  return all;
}

void Bootstrap::finish(Result<void> result) {
  if (handler_) std::exchange(handler_, {})(std::move(result));
}

}  // namespace dmoe::dht
