// Keeps every record on the nodes nearest to its key as nodes come and go. Private to dht.
#pragma once

#include "dht/publisher.hpp"

#include <optional>
#include <unordered_set>

namespace dmoe::dht {

/// A new contact nearer to a key than this node gets its records, from the nearest of the old holders only. Long-lived
/// records are handed to all holders now and then as well, for those that vanished without a newcomer.
class Replicator {
 public:
  Replicator(NodeCore& core, Publisher& publisher);

  void on_new_contact(const NodeId& id);
  void tick();

 private:
  void slice();
  void hand_over(const Key& key);

  NodeCore& core_;
  Publisher& publisher_;
  std::unordered_set<NodeId> newcomers_;  // Since the last round.
  std::unordered_set<NodeId> serving_;    // Whom this round is for.
  bool everybody_ = false;                // This round is the periodic one.
  bool running_ = false;
  std::optional<Key> cursor_;
  TimePoint next_newcomers_;
  TimePoint next_periodic_;
};

}  // namespace dmoe::dht
