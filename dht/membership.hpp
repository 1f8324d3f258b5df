// Joining, staying joined, and keeping the table true. Private to dht.
#pragma once

#include "dht/node_core.hpp"

#include <array>
#include <deque>
#include <unordered_map>

namespace dmoe::dht {

/// Reaches initial peers for ever (with jittered back-off once a peer answered, rarely), asks strangers for their
/// proof, pings before it evicts, refreshes buckets that nobody used, and after an outage goes back to whom it knew.
class Membership {
 public:
  struct Hooks {
    std::function<void(const NodeId&)> on_new_contact;
    std::function<void(std::function<void()> join)> before_joining;  ///< At the first contact, once.
  };

  Membership(NodeCore& core, Hooks hooks);

  void bootstrap(std::vector<Address> peers, std::function<void()> on_contact,
                 std::function<void(const Address&)> on_conflict);
  /// About once a second.
  void tick();
  /// Initial peers are given, and nobody answered yet.
  bool joining() const noexcept { return !contacted_ && !beacons_.empty(); }
  /// Runs `action` at the first contact, or at once after it.
  void when_contacted(std::function<void()> action);
  /// Lets the neighbours know of this node: it became one of them.
  void look_soon();
  /// Runs what waits for a contact: there will be none.
  void stop();

  void on_proven(const NodeId& id, const Address& address);
  void on_heard(const NodeId& id, const Address& address);
  void on_failed(const NodeId& id, const Address& address);
  void on_client(const NodeId& id, const Address& address);
  void on_stranger(const NodeId& id, const Address& address);
  void on_conflict(const Address& elsewhere);

  /// The table as bytes, and back: contacts read are only addresses to try, and prove themselves anew.
  std::vector<std::uint8_t> save() const;
  void restore(const std::vector<std::uint8_t>& state);

 private:
  /// An address to be kept trying.
  struct Beacon {
    TimePoint next;
    Duration pause;
  };

  void try_beacons();
  void on_beacon(const NodeId& id, const Address& address);
  void remember(const Address& address);
  void look_for_self(const std::vector<wire::NodeInfo>& seeds);
  void refresh(int bucket);
  void fill_buckets();
  void seek_contact();
  Duration silence() const;
  bool in_table(const Address& address) const;
  Key random_key_in(int bucket);

  NodeCore& core_;
  Hooks hooks_;
  std::function<void()> on_contact_;
  std::function<void(const Address&)> on_conflict_;
  std::vector<std::function<void()>> waiting_;
  std::unordered_map<Address, Beacon> beacons_;   // Initial peers.
  std::deque<Address> lifeline_;                  // Proven lately: the way back after an outage. Newest last.
  std::unordered_map<Address, TimePoint> asked_;  // Strangers asked for their proof, and until when not again.
  std::size_t asking_ = 0;
  std::vector<wire::NodeInfo> seeds_;  // Who answered before this node may join.
  bool preparing_ = false;
  bool may_join_ = false;
  bool contacted_ = false;
  bool looking_for_self_ = false;
  bool buckets_filled_ = false;
  int early_looks_ = 0;  // The first self-lookups come soon after each other.
  TimePoint next_self_look_;
  TimePoint next_refresh_;
  std::array<TimePoint, 64> refreshed_{};  // By bucket: idle ones are not looked through again and again.
  bool lost_ = false;                      // Those who were asked after a silence did not answer either.
  Duration rejoin_pause_;
  TimePoint next_rejoin_;
};

}  // namespace dmoe::dht
