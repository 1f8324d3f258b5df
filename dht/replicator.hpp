// Keeps every record on the nodes nearest to its key as nodes come and go. Private to dht.
#pragma once

#include "dht/hand_over.hpp"

#include <optional>
#include <unordered_set>

namespace dmoe::dht {

/// A new contact nearer to a key than this node gets its records, from the nearest of the old holders only; and again
/// after half a minute, since that holder may have been a newcomer itself a moment before, still without them.
/// Long-lived records are handed to all holders now and then as well, for those that vanished without a newcomer.
class Replicator {
 public:
  explicit Replicator(NodeCore& core);

  void on_new_contact(const NodeId& id);
  void tick();
  /// This node ceases to be a holder: all that it holds goes to those that remain.
  void leave();

 private:
  void slice();
  void hand_over(const Key& key);

  NodeCore& core_;
  HandOver hand_over_;
  std::unordered_set<NodeId> newcomers_;  // Since the last round.
  std::unordered_set<NodeId> again_;      // Served once, and to be served again.
  std::unordered_set<NodeId> serving_;    // Whom this round is for.
  bool everybody_ = false;                // This round is the periodic one.
  bool leaving_ = false;                  // One more round, with everything.
  bool farewell_ = false;                 // This round is that one.
  bool running_ = false;
  std::optional<Key> cursor_;
  TimePoint next_newcomers_;
  TimePoint next_again_;
  TimePoint next_periodic_;
};

}  // namespace dmoe::dht
