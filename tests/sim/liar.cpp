#include "tests/sim/liar.hpp"

namespace dmoe::sim {

namespace wire = dht::wire;

Liar::Liar(Host& host, World& world, const std::vector<wire::NodeInfo>& accomplices)
    : host_(host), world_(world), accomplices_(accomplices) {
  host_.on_receive([this](const Address& source, std::span<const std::uint8_t> datagram) { answer(source, datagram); });
}

void Liar::answer(const Address& source, std::span<const std::uint8_t> datagram) {
  const auto message = wire::decode(datagram);
  if (!message || std::holds_alternative<wire::Reply>(message->body)) return;
  wire::Reply reply;
  reply.observed = source;
  if (message->prove) {
    reply.proof = host_.signer().sign(wire::proof_message(message->transaction, message->sender));
  }
  if (const auto* find = std::get_if<wire::Find>(&message->body)) {
    reply.done_keys = ~0ULL;
    if (only_) reply.nodes.push_back(*only_);
    for (std::size_t i = 0; i < 8 && !only_; ++i) {
      wire::NodeInfo fake{dht::NodeId{find->keys.front().bytes}, {}};
      for (std::size_t byte = 4; byte < 32; ++byte) fake.id.bytes[byte] = static_cast<std::uint8_t>(world_.random());
      fake.address = Address::v4(static_cast<std::uint32_t>(0x60000000U + world_.random() % 0x01000000U), 4040);
      if (!victims_.empty()) fake.address = victims_[world_.random() % victims_.size()];
      reply.nodes.push_back(fake);
    }
    for (std::size_t i = 0; i < 8 && !accomplices_.empty() && !only_; ++i) {
      reply.nodes.push_back(accomplices_[world_.random() % accomplices_.size()]);
    }
  } else if (const auto* store = std::get_if<wire::Store>(&message->body)) {
    reply.acks.assign(store->records.size(), wire::Ack::kStored);
  }
  wire::Message out;
  out.transaction = message->transaction;
  out.cookie = 1;
  out.sender = host_.signer().public_key();
  out.body = std::move(reply);
  wire::Buffer buffer;
  if (wire::encode(out, buffer)) host_.send(source, buffer.bytes());
}

}  // namespace dmoe::sim
