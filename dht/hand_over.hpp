// Gives somebody's signed records to other holders. Private to dht.
#pragma once

#include "dht/node_core.hpp"

#include <deque>
#include <memory>
#include <vector>

namespace dmoe::dht {

/// Records travel with what remains of their lives; nobody is told what came of it, since the next round repeats it.
/// Large values go one after the other in parts; the first part asks whether the rest is wanted.
class HandOver {
 public:
  explicit HandOver(NodeCore& core) : core_(core) {}

  void send(const std::vector<LiveRecord>& records, const wire::NodeInfo& to);

 private:
  struct Large {
    LiveRecord live;
    wire::NodeInfo to;
    std::size_t next = 0;  // Offset of the part to send next.
    std::size_t open = 0;  // Parts on their way.
    bool wanted = false;   // The first part was taken.
    bool repeated = false;
    bool broken = false;
  };

  void send_store(const wire::NodeInfo& to, wire::Store store, bool repeated);
  void next_large();
  void send_part(const std::shared_ptr<Large>& large, std::size_t offset);
  void on_part(const std::shared_ptr<Large>& large, std::size_t offset, std::optional<wire::Ack> ack);

  static constexpr std::size_t kMaxLarge = 512;  // Waiting; beyond it the next round has to do.

  NodeCore& core_;
  std::deque<std::shared_ptr<Large>> large_;  // The first is on its way.
};

}  // namespace dmoe::dht
