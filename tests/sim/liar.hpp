// Nodes that answer, prove their keys, and lie.
#pragma once

#include "dht/cookie.hpp"
#include "dht/wire.hpp"
#include "tests/sim/world.hpp"

namespace dmoe::sim {

/// Speaks the protocol and passes every proof, but holds nothing: it acknowledges stores that it forgets, has no
/// records, and names nodes near the target that do not exist or are other liars.
class Liar {
 public:
  /// `accomplices` are read when it answers.
  Liar(Host& host, World& world, const std::vector<dht::wire::NodeInfo>& accomplices);
  /// From now on the nodes that it invents live at these addresses instead of nowhere.
  void blame(std::vector<Address> victims) { victims_ = std::move(victims); }
  /// From now on it names this one node only, with an address or without.
  void name_only(dht::wire::NodeInfo node) { only_ = node; }
  dht::wire::NodeInfo info() const { return {net::peer_id_of(host_.signer().public_key()), host_.address}; }

 private:
  void answer(const Address& source, std::span<const std::uint8_t> datagram);

  Host& host_;
  World& world_;
  const std::vector<dht::wire::NodeInfo>& accomplices_;
  std::vector<Address> victims_;
  std::optional<dht::wire::NodeInfo> only_;
};

}  // namespace dmoe::sim
