#include "dht/replicator.hpp"

#include <algorithm>
#include <utility>

namespace dmoe::dht {
namespace {

using namespace std::chrono_literals;

constexpr Duration kGather = 2s;  // Newcomers of this long share a round.
constexpr Duration kAgain = 30s;
constexpr Duration kPeriod = 10min;
constexpr Duration kLongLived = 5min;  // Shorter ones are renewed by their publishers before a period is over.
constexpr Duration kSlicePause = 20ms;
constexpr std::size_t kSliceKeys = 128;

}  // namespace

Replicator::Replicator(NodeCore& core)
    : core_(core),
      hand_over_(core),
      next_newcomers_(core.clock.now()),
      next_again_(core.clock.now()),
      next_periodic_(core.clock.now() + core.jittered(kPeriod)) {}

void Replicator::on_new_contact(const NodeId& id) {
  if (core_.client || core_.store.stats().records == 0) return;
  if (newcomers_.empty()) next_newcomers_ = core_.clock.now() + kGather;
  newcomers_.insert(id);
}

void Replicator::tick() {
  const TimePoint now = core_.clock.now();
  if (running_ || (core_.client && !leaving_)) return;
  farewell_ = std::exchange(leaving_, false);
  if (farewell_) {
    everybody_ = true;
  } else if (!newcomers_.empty() && now >= next_newcomers_) {
    serving_ = std::exchange(newcomers_, {});
    if (again_.empty()) next_again_ = now + kAgain;
    again_.insert(serving_.begin(), serving_.end());
    everybody_ = false;
  } else if (!again_.empty() && now >= next_again_) {
    serving_ = std::exchange(again_, {});
    everybody_ = false;
  } else if (now >= next_periodic_) {
    next_periodic_ = now + core_.jittered(kPeriod);
    everybody_ = true;
  } else {
    return;
  }
  running_ = true;
  cursor_.reset();
  slice();
}

void Replicator::leave() {
  leaving_ = true;
  if (!running_) tick();
}

void Replicator::slice() {
  const auto keys = core_.store.keys_after(cursor_, kSliceKeys, core_.clock.now());
  if (keys.empty()) {
    running_ = false;
    return;
  }
  for (const Key& key : keys) hand_over(key);
  cursor_ = keys.back();
  core_.after(kSlicePause, [this] { slice(); });
}

void Replicator::hand_over(const Key& key) {
  auto nearest = core_.table.closest(key.bytes, kReplication);
  std::vector<wire::NodeInfo> to;
  if (everybody_) {
    to = nearest;
  } else {
    const auto is_new = [&](const wire::NodeInfo& node) { return serving_.contains(node.id); };
    std::copy_if(nearest.begin(), nearest.end(), std::back_inserter(to), is_new);
    if (to.empty()) return;
    // Only the nearest of the old holders speaks; the others hold their copies as before.
    const bool other_speaks = std::any_of(nearest.begin(), nearest.end(), [&](const wire::NodeInfo& node) {
      return !is_new(node) && closer(node.id.bytes, core_.self.bytes, key.bytes);
    });
    if (other_speaks) return;
  }
  const TimePoint now = core_.clock.now();
  std::vector<LiveRecord> records;
  core_.store.visit(key, now, 0, [&](const LiveRecord& live) {
    if (!everybody_ || farewell_ || live.deadline - now > kLongLived) records.push_back(live);
    return true;
  });
  for (const wire::NodeInfo& node : to) hand_over_.send(records, node);
}

}  // namespace dmoe::dht
