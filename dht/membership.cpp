#include "dht/membership.hpp"

#include <algorithm>
#include <utility>

namespace dmoe::dht {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kLifeline = 64;
constexpr std::size_t kMaxAsking = 64;
constexpr std::size_t kMaxAsked = 1'024;
constexpr Duration kAskAgain = 30s;
constexpr Duration kBeaconKnownPause = 5min;  // An initial peer that answered: only to notice a split.
constexpr Duration kSilence = 12s;            // Nobody heard for so long: ask some whether they are there.
constexpr std::size_t kLifelinePings = 8;     // When those are not: so many of the lifeline at a time.
constexpr std::size_t kSilencePings = 3;
constexpr Duration kClientSilence = 5min;
constexpr Duration kSelfLookPeriod = 60s;
constexpr Duration kBucketIdle = 15min;
constexpr int kWideLooks = 4;  // One for each 32 places of the first bucket, and half of it for the next.
constexpr int kWideDepth = 5;
constexpr int kNeighbourhood = 3;
constexpr Duration kTrustUnheard = 60s;  // The stalest entry of a full bucket is pinged after this.

}  // namespace

Membership::Membership(NodeCore& core, Hooks hooks)
    : core_(core),
      hooks_(std::move(hooks)),
      next_self_look_(core.clock.now()),
      next_refresh_(core.clock.now() + core.jittered(60s)),
      rejoin_pause_(1s),
      next_rejoin_(core.clock.now()) {}

void Membership::bootstrap(std::vector<Address> peers, std::function<void()> on_contact,
                           std::function<void(const Address&)> on_conflict) {
  on_contact_ = std::move(on_contact);
  on_conflict_ = std::move(on_conflict);
  const auto old = std::exchange(beacons_, {});
  for (const Address& peer : peers) {
    const auto known = old.find(peer);
    beacons_.emplace(peer, known != old.end() ? known->second : Beacon{core_.clock.now(), 100ms});
  }
  if (contacted_ && on_contact_) core_.post(on_contact_);
  try_beacons();
}

void Membership::when_contacted(std::function<void()> action) {
  if (contacted_) return action();
  waiting_.push_back(std::move(action));
}

void Membership::stop() {
  for (const auto& action : std::exchange(waiting_, {})) action();
}

bool Membership::in_table(const Address& address) const {
  const Peer* peer = core_.book.find(address);
  if (peer == nullptr || !peer->proven) return false;
  const Contact* contact = core_.table.find(*peer->proven);
  return contact != nullptr && contact->address == address;
}

void Membership::try_beacons() {
  const TimePoint now = core_.clock.now();
  for (auto& [address, beacon] : beacons_) {
    if (beacon.next > now) continue;
    if (in_table(address)) {
      beacon.next = now + core_.jittered(kBeaconKnownPause);
      continue;
    }
    beacon.next = now + core_.jittered(beacon.pause);
    beacon.pause = std::min<Duration>(beacon.pause * 2, core_.options.bootstrap_max);
    Request ping;
    ping.to = address;
    ping.body = wire::Ping{};
    ping.repeats = 2;
    ping.on_reply = [this, to = address](const wire::Message& message, const wire::Reply&) {
      on_beacon(message.sender_id, to);
    };
    core_.requests.start(std::move(ping));
  }
}

void Membership::on_beacon(const NodeId& id, const Address& address) {
  if (const auto beacon = beacons_.find(address); beacon != beacons_.end()) {
    beacon->second.pause = core_.options.bootstrap_period;
    beacon->second.next = core_.clock.now() + core_.jittered(kBeaconKnownPause);
  }
  early_looks_ = 0;
  if (may_join_) return look_for_self({{id, address}});
  seeds_.push_back({id, address});
  if (std::exchange(preparing_, true)) return;
  hooks_.before_joining([this] {
    may_join_ = true;
    look_for_self(std::exchange(seeds_, {}));
  });
}

void Membership::remember(const Address& address) {
  const auto known = std::find(lifeline_.begin(), lifeline_.end(), address);
  if (known != lifeline_.end()) return;
  lifeline_.push_back(address);
  if (lifeline_.size() > kLifeline) lifeline_.pop_front();
}

void Membership::on_proven(const NodeId& id, const Address& address) {
  switch (core_.table.offer(id, address, core_.clock.now())) {
    case RoutingTable::Offer::kAdded:
      remember(address);
      hooks_.on_new_contact(id);
      return;
    case RoutingTable::Offer::kSpare: {
      const auto stalest = core_.table.stalest(id);
      if (!stalest || core_.clock.now() - stalest->last_heard < kTrustUnheard) return;
      Request ping;
      ping.to = stalest->address;
      ping.expected = stalest->id;
      ping.body = wire::Ping{};
      core_.requests.start(std::move(ping));  // What comes of it reaches the table through on_heard or on_failed.
      return;
    }
    case RoutingTable::Offer::kKnown:
    case RoutingTable::Offer::kRefused: return;
  }
}

void Membership::on_heard(const NodeId& id, const Address& address) {
  const TimePoint now = core_.clock.now();
  core_.last_heard = now;
  rejoin_pause_ = 1s;
  core_.table.heard(id, address, now);
  if (std::exchange(contacted_, true)) return;
  if (on_contact_) core_.post(on_contact_);
  for (auto& action : std::exchange(waiting_, {})) core_.post(std::move(action));
}

void Membership::on_failed(const NodeId& id, const Address& address) { core_.table.failed(id, address); }

/// Whoever became a client takes itself out.
void Membership::on_client(const NodeId& id, const Address& address) {
  const Contact* known = core_.table.find(id);
  if (known != nullptr && known->address == address) core_.table.remove(id);
}

/// Somebody asked us something. It enters the table only after it signed our nonce at that address.
void Membership::on_stranger(const NodeId& id, const Address& address) {
  if (core_.book.has_proven(address, id)) return on_proven(id, address);
  if (asking_ >= kMaxAsking || !core_.table.wants(id, address)) return;
  const TimePoint now = core_.clock.now();
  if (asked_.size() >= kMaxAsked) {
    std::erase_if(asked_, [&](const auto& entry) { return entry.second <= now; });
    if (asked_.size() >= kMaxAsked) return;
  }
  const auto [entry, fresh] = asked_.try_emplace(address, now + kAskAgain);
  if (!fresh && entry->second > now) return;
  entry->second = now + kAskAgain;
  ++asking_;
  Request ping;
  ping.to = address;
  ping.expected = id;
  ping.body = wire::Ping{};
  ping.on_reply = [this](const wire::Message&, const wire::Reply&) { --asking_; };
  ping.on_failure = [this] { --asking_; };
  core_.requests.start(std::move(ping));
}

void Membership::on_conflict(const Address& elsewhere) {
  if (on_conflict_) core_.post([action = on_conflict_, elsewhere] { action(elsewhere); });
}

Key Membership::random_key_in(int bucket) {
  Key key;
  for (std::size_t i = 0; i < 32; i += 8) {
    const std::uint64_t word = core_.random();
    for (std::size_t j = 0; j < 8; ++j) key.bytes[i + j] = static_cast<std::uint8_t>(word >> (8 * j));
  }
  // The first `bucket` bits as ours, the next one different.
  for (int bit = 0; bit <= bucket && bit < 256; ++bit) {
    const auto mask = static_cast<std::uint8_t>(0x80U >> (bit % 8));
    const auto byte = static_cast<std::size_t>(bit / 8);
    const bool ours = (core_.self.bytes[byte] & mask) != 0;
    const bool set = bit == bucket ? !ours : ours;
    key.bytes[byte] = static_cast<std::uint8_t>(set ? key.bytes[byte] | mask : key.bytes[byte] & ~mask);
  }
  return key;
}

void Membership::look_for_self(const std::vector<wire::NodeInfo>& seeds) {
  if (looking_for_self_) return;
  looking_for_self_ = true;
  LookupOptions options;
  options.want_records = false;
  // The first repeat only looks for who joined in the same moment.
  options.width = early_looks_ == 1 ? kReplication : kBucketSize;
  core_.look_up(
      {Key{core_.self.bytes}}, options,
      [this](std::size_t, LookupOutcome) {
        looking_for_self_ = false;
        // One refresh of the buckets once there is somebody to ask; two early repeats find those who joined meanwhile.
        if (!std::exchange(buckets_filled_, core_.table.size() != 0)) {
          fill_buckets();
        }
        // A client has no neighbours that need to know it.
        const Duration period = core_.client ? kBucketIdle : kSelfLookPeriod;
        const Duration pause = early_looks_ == 0 ? Duration{1s} : early_looks_ == 1 ? Duration{4s} : period;
        ++early_looks_;
        next_self_look_ = core_.clock.now() + core_.jittered(pause);
      },
      seeds);
}

/// The first buckets have more places than one walk names nodes for; a small network, and a client, do without.
void Membership::fill_buckets() {
  const int depth = core_.table.depth();
  const bool wide = !core_.client && depth >= kWideDepth;
  for (int bucket = 0; bucket < depth; ++bucket) {
    // The deepest were filled by the search for the own neighbours.
    const bool found = wide && bucket + kNeighbourhood >= depth;
    const int looks = found ? 0 : wide && bucket < 3 ? kWideLooks >> bucket : 1;
    for (int look = 0; look < looks; ++look) refresh(bucket);
  }
}

void Membership::refresh(int bucket) {
  LookupOptions options;
  options.want_records = false;
  core_.look_up({random_key_in(bucket)}, options, [](std::size_t, LookupOutcome) {});
}

void Membership::tick() {
  const TimePoint now = core_.clock.now();
  try_beacons();
  if (!lifeline_.empty() && now - core_.last_heard > silence() && now >= next_rejoin_) seek_contact();
  if (core_.table.size() == 0) return;
  if (preparing_ && !may_join_) return;
  if (now >= next_self_look_ && !looking_for_self_) look_for_self({});
  if (now >= next_refresh_) {
    next_refresh_ = now + core_.jittered(60s);
    std::erase_if(asked_, [&](const auto& entry) { return entry.second <= now; });
    for (int bucket = 0; bucket < core_.table.depth(); ++bucket) {
      // Some buckets stay empty: there is nobody for them.
      TimePoint& refreshed = refreshed_[static_cast<std::size_t>(bucket)];
      if (now - refreshed < kBucketIdle || !core_.table.stale(bucket, now - kBucketIdle)) continue;
      refreshed = now;
      refresh(bucket);
      return;  // One a minute.
    }
  }
}

/// Nobody asks a client anything. Its table stays good as long as it asks nobody; and the fewer it writes to, the more
/// strangers there are who can tell whether they reach it.
Duration Membership::silence() const {
  return core_.client && core_.table.size() != 0 && !lost_ ? kClientSilence : kSilence;
}

void Membership::look_soon() {
  early_looks_ = 0;
  next_self_look_ = core_.clock.now();
}

/// Silence may be idleness: some are asked whether they are there. Only when none of them is was there an outage, after
/// which neighbours and buckets are found anew.
void Membership::seek_contact() {
  const TimePoint now = core_.clock.now();
  next_rejoin_ = now + core_.jittered(rejoin_pause_);
  rejoin_pause_ = std::min<Duration>(rejoin_pause_ * 2, core_.options.bootstrap_max);
  const std::size_t pings = lost_ ? kLifelinePings : kSilencePings;
  for (std::size_t i = 0; i < pings; ++i) {
    const Address address = lifeline_[core_.random() % lifeline_.size()];
    Request ping;
    ping.to = address;
    ping.body = wire::Ping{};
    ping.on_reply = [this, address](const wire::Message& message, const wire::Reply&) {
      if (!std::exchange(lost_, false)) return;
      buckets_filled_ = false;
      on_beacon(message.sender_id, address);
    };
    ping.on_failure = [this] { lost_ = lost_ || core_.clock.now() - core_.last_heard > silence(); };
    core_.requests.start(std::move(ping));
  }
}

std::vector<std::uint8_t> Membership::save() const {
  std::vector<std::uint8_t> state;
  for (const Contact& contact : core_.table.contacts()) {
    state.insert(state.end(), contact.address.ip.begin(), contact.address.ip.end());
    state.push_back(static_cast<std::uint8_t>(contact.address.port >> 8U));
    state.push_back(static_cast<std::uint8_t>(contact.address.port));
  }
  return state;
}

void Membership::restore(const std::vector<std::uint8_t>& state) {
  for (std::size_t at = 0; at + 18 <= state.size() && lifeline_.size() < kLifeline; at += 18) {
    Address address;
    std::copy_n(state.begin() + static_cast<std::ptrdiff_t>(at), 16, address.ip.begin());
    address.port = static_cast<std::uint16_t>(state[at + 16] << 8U | state[at + 17]);
    if (address.is_unicast()) lifeline_.push_back(address);
  }
  // Go back to them at the first tick.
  lost_ = !lifeline_.empty();
  core_.last_heard = core_.clock.now() - kSilence - 1s;
}

}  // namespace dmoe::dht
