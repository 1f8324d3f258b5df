// k-buckets: the nodes that proved who they are.
#pragma once

#include "dht/wire.hpp"

#include <cstdint>
#include <optional>
#include <vector>

namespace dmoe::dht {

inline constexpr std::size_t kBucketSize = 20;  ///< k: nodes in one k-bucket. Kademlia §2.2.
inline constexpr std::size_t kReplication = 8;  ///< Nearest nodes asked to hold a record.

struct Contact {
  NodeId id;
  Address address;
  TimePoint last_heard;
  std::uint8_t failures = 0;  ///< Unanswered requests since it was last heard.
};

/// Buckets by the number of leading bits shared with the own id. The first three are wider (128, 64, 32): they cover
/// most of the network, and each doubling saves part of a hop. Every entry proved its key and its address.
class RoutingTable {
 public:
  enum class Offer {
    kAdded,
    kKnown,
    kSpare,    ///< The bucket is full: kept as a replacement. Ping `stalest` and report what came of it.
    kRefused,  ///< Own id, an id known elsewhere, or too many of its subnet.
  };

  RoutingTable(const NodeId& self, bool limit_subnets) : self_(self), limit_subnets_(limit_subnets) {}

  Offer offer(const NodeId& id, const Address& address, TimePoint now);
  /// Whether `offer` could make use of the node: worth asking it for its proof.
  bool wants(const NodeId& id, const Address& address) const;
  const Contact* find(const NodeId& id) const;
  void heard(const NodeId& id, const Address& address, TimePoint now);
  /// A request went unanswered. The second failure in a row, or the first when a replacement waits, ends the entry.
  /// @return whether the entry was dropped.
  bool failed(const NodeId& id, const Address& address);
  void remove(const NodeId& id);
  /// The entry of `id`'s bucket that was silent longest.
  std::optional<Contact> stalest(const NodeId& id) const;

  /// The `count` known nodes nearest to `target`, nearest first.
  std::vector<wire::NodeInfo> closest(const Bits& target, std::size_t count) const;
  /// Whether fewer than kReplication known nodes are nearer to `target` than the own id.
  bool self_is_near(const Bits& target) const;

  std::size_t size() const noexcept { return size_; }
  bool limits_subnets() const noexcept { return limit_subnets_; }
  std::vector<Contact> contacts() const;
  /// The deepest bucket that has an entry: about log2 of the network's size.
  int depth() const noexcept;
  /// Whether bucket `index` has heard nobody since `since`.
  bool stale(int index, TimePoint since) const;

 private:
  struct Bucket {
    std::vector<Contact> live;
    std::vector<Contact> spare;  // Proven, but no room: newest last.
  };
  static constexpr std::size_t kBuckets = 64;  // Deeper ones would need more nodes than there are atoms to run them.

  static std::size_t capacity(std::size_t index) noexcept;
  std::size_t index_of(const NodeId& id) const noexcept;
  bool subnet_full(const Bucket& bucket, const Address& address) const;
  void promote_spare(Bucket& bucket);

  NodeId self_;
  bool limit_subnets_;
  std::vector<Bucket> buckets_;  // Grown to the deepest used.
  std::size_t size_ = 0;
};

}  // namespace dmoe::dht
