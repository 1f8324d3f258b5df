// Puts records onto the nodes nearest to their keys. Private to dht.
#pragma once

#include "dht/node_core.hpp"

#include <functional>
#include <map>
#include <memory>
#include <unordered_set>

namespace dmoe::dht {

/// Signs and sends what this node publishes. What is asked for while a batch is on its way joins the next one (group
/// commit): under load, many records share one signature, and each holder verifies it once.
class Publisher {
 public:
  using Handler = std::function<void(std::vector<Result<StoreReport>>)>;

  explicit Publisher(NodeCore& core) : core_(core) {}

  void add(std::vector<StoreRequest> requests, Handler handler);
  /// About once a second: publishes anew what is to be kept.
  void tick();
  /// Answers everything that waits or is on its way with kCancelled, and so what comes later.
  void stop();

 private:
  friend class Publication;
  struct Order {
    std::vector<Result<StoreReport>> results;
    std::size_t open = 0;
    Handler handler;
  };
  struct Waiting {
    StoreRequest request;
    std::shared_ptr<Order> order;
    std::size_t index = 0;
    bool repeated = false;  // Signed anew after a holder knew a newer sequence.
  };

  /// A record that its publisher renews.
  struct Kept {
    StoreRequest request;
    TimePoint next;
  };

  void keep(const StoreRequest& request);
  void flush_soon();
  void flush();
  std::uint64_t next_sequence();
  void settle(const Waiting& waiting, Result<StoreReport> result);
  void learn_sequence(Waiting waiting);

  NodeCore& core_;
  std::vector<Waiting> waiting_;
  std::map<std::pair<Key, std::string>, Kept> kept_;
  std::unordered_set<std::shared_ptr<Order>> orders_;  // Not answered yet.
  bool stopped_ = false;
  std::size_t on_their_way_ = 0;
  bool flush_posted_ = false;
  TimerId flush_timer_ = 0;
  bool flush_timed_ = false;
  std::uint64_t last_sequence_ = 0;
};

}  // namespace dmoe::dht
