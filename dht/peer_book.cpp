#include "dht/peer_book.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

namespace dmoe::dht {
namespace {

constexpr Duration kShortest = std::chrono::milliseconds{4};  // Below it scheduling noise looks like a slow peer.
constexpr Duration kLongest = std::chrono::milliseconds{1'500};
constexpr Duration kUnknown = std::chrono::milliseconds{400};  // Before the first answer from anybody.

}  // namespace

void RoundTrip::add(Duration sample) noexcept {
  const float us = std::max(1.F, std::chrono::duration<float, std::micro>(sample).count());
  if (!known()) {
    mean_us = us;
    deviation_us = us / 4;
    return;
  }
  deviation_us += (std::fabs(us - mean_us) - deviation_us) / 8;
  mean_us += (us - mean_us) / 8;
}

Duration RoundTrip::usual() const noexcept {
  return std::chrono::duration_cast<Duration>(std::chrono::duration<float, std::micro>(mean_us + 3 * deviation_us));
}

Peer* PeerBook::look_up(const Address& address) const {
  if (last_peer_ != nullptr && last_address_ == address) return last_peer_;
  const auto found = peers_.find(address);
  if (found == peers_.end()) return nullptr;
  last_address_ = address;
  last_peer_ = &found->second;
  return last_peer_;
}

Peer& PeerBook::at(const Address& address, TimePoint now) {
  Peer* peer = look_up(address);
  if (peer == nullptr) {
    if (peers_.size() >= kCapacity) forget_some();
    peer = &peers_[address];
  }
  peer->last_used = now;
  return *peer;
}

const Peer* PeerBook::find(const Address& address) const { return look_up(address); }

void PeerBook::heard(const Address& address, std::optional<Duration> round_trip, TimePoint now) {
  Peer& peer = at(address, now);
  peer.last_heard = now;
  peer.unheard = 0;
  if (!round_trip) return;
  peer.round_trip.add(*round_trip);
  everybody_.add(*round_trip);
}

Duration PeerBook::patience(const Address& address) const {
  const Peer* peer = find(address);
  if (peer != nullptr && peer->round_trip.known()) return std::clamp(peer->round_trip.usual(), kShortest, kLongest);
  if (everybody_.known()) return std::clamp(everybody_.usual(), kShortest, kLongest);
  return kUnknown;
}

bool PeerBook::has_proven(const Address& address, const NodeId& id) const {
  const Peer* peer = find(address);
  return peer != nullptr && peer->proven == id;
}

void PeerBook::forget_some() {
  last_peer_ = nullptr;
  std::vector<TimePoint> used;
  used.reserve(peers_.size());
  for (const auto& [address, peer] : peers_) used.push_back(peer.last_used);
  const auto quarter = used.begin() + static_cast<std::ptrdiff_t>(used.size() / 4);
  std::nth_element(used.begin(), quarter, used.end());
  std::erase_if(peers_, [limit = *quarter](const auto& entry) { return entry.second.last_used <= limit; });
}

}  // namespace dmoe::dht
