// What this node knows about the addresses it talks to, shared by all its lookups.
#pragma once

#include "dht/environment.hpp"
#include "dht/key.hpp"

#include <cstdint>
#include <optional>
#include <unordered_map>

namespace dmoe::dht {

/// Round-trip time of one peer, or of all together, as TCP keeps it (RFC 6298).
struct RoundTrip {
  float mean_us = 0;
  float deviation_us = 0;

  bool known() const noexcept { return mean_us > 0; }
  void add(Duration sample) noexcept;
  /// What an ordinary answer stays under: about the 95th percentile.
  Duration usual() const noexcept;
};

struct Peer {
  std::uint64_t cookie = 0;      ///< What it last gave us.
  std::optional<NodeId> proven;  ///< Whose key it proved at this address.
  RoundTrip round_trip;
  TimePoint last_used;
  TimePoint last_heard;
  std::uint16_t unheard = 0;  ///< Requests sent to it on somebody's word since it was last heard, …
  TimePoint unheard_since;    ///< … and when the first of them went out.
};

/// Peers by address; forgets those unused for longest when it has kCapacity of them.
class PeerBook {
 public:
  /// The peer's entry, made when it is new.
  Peer& at(const Address& address, TimePoint now);
  const Peer* find(const Address& address) const;

  void heard(const Address& address, std::optional<Duration> round_trip, TimePoint now);
  /// When a request to `address` counts as slow: one more slot is opened then.
  Duration patience(const Address& address) const;
  bool has_proven(const Address& address, const NodeId& id) const;
  const RoundTrip& everybody() const noexcept { return everybody_; }

 private:
  static constexpr std::size_t kCapacity = 768;
  void forget_some();
  Peer* look_up(const Address& address) const;

  mutable std::unordered_map<Address, Peer> peers_;
  // Who was looked up last: a datagram's peer is needed several times in a row.
  mutable Address last_address_;
  mutable Peer* last_peer_ = nullptr;
  RoundTrip everybody_;
};

}  // namespace dmoe::dht
