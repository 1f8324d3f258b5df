// One signed batch on its way to its holders. Private to dht.
#pragma once

#include "dht/publisher.hpp"

#include <functional>
#include <memory>
#include <vector>

namespace dmoe::dht {

/// Each record goes to the 8 nearest nodes that take it. Where the table already knows 8 that gave a cookie and are
/// as near to the key as its holders should be, the record is sent at once, and two of the holders say whom they know
/// nearer; otherwise a walk finds them first. A slow or refusing node is replaced by the next.
class Publication : public std::enable_shared_from_this<Publication> {
 public:
  struct Fate {
    std::size_t replicas = 0;
    bool newer_exists = false;
    bool all_full = false;
  };
  /// Called once per record; the last call may destroy the publication's owner.
  using OnRecord = std::function<void(std::size_t index, const Fate& fate)>;

  Publication(NodeCore& core, std::vector<Record> records, OnRecord on_record);
  void start();

 private:
  enum class State : std::uint8_t { kNew, kSent, kSlow, kStored, kRefused };
  struct Holder {
    wire::NodeInfo node;
    State state = State::kNew;
    std::uint8_t cookie_retries = 0;
  };
  struct Item {
    std::vector<Holder> holders;  // Nearest first.
    std::size_t replicas = 0;
    std::size_t refused_full = 0;
    std::size_t refused = 0;
    bool newer_exists = false;
    bool optimistic = false;  // Sent without a walk.
    bool done = false;
  };

  bool table_will_do(const std::vector<wire::NodeInfo>& nearest, const Key& key) const;
  void add_holder(std::size_t index, const wire::NodeInfo& node);
  void dispatch_soon();
  void dispatch();
  void send_group(const wire::NodeInfo& node, const std::vector<std::size_t>& indices);
  void send_store(const wire::NodeInfo& node, std::vector<std::size_t> indices);
  void send_chunks(const wire::NodeInfo& node, std::size_t index);
  void on_ack(const NodeId& id, std::size_t index, wire::Ack ack);
  void set_state(const NodeId& id, std::size_t index, State state);
  Holder* holder(std::size_t index, const NodeId& id);
  void finish_if_done(std::size_t index);
  wire::TravellingRecord travelling(std::size_t index) const;

  NodeCore& core_;
  std::vector<Record> records_;
  std::vector<Item> items_;
  OnRecord on_record_;
  TimePoint signed_at_;
  int usual_bits_ = 0;  // What a key's eighth nearest node has in common with it, judged by this node's neighbours.
  bool dispatch_posted_ = false;
};

}  // namespace dmoe::dht
