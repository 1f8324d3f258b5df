// Any bytes as a datagram: to the parser, to a node, to the record and listing readers.
#include "dht/listing.hpp"
#include "dht/wire.hpp"
#include "tests/sim/world.hpp"

#include <cstdint>
#include <cstdlib>
#include <memory>

namespace {

using namespace dmoe;

/// A node with a few neighbours, which takes one datagram after the other.
struct Target {
  sim::World world{1};
  sim::Host* attacker = nullptr;

  Target() {
    world.grow(4, std::chrono::milliseconds{20}, std::chrono::seconds{5});
    attacker = &world.add_host();
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span<const std::uint8_t> bytes(data, size);
  if (const auto message = dht::wire::decode(bytes)) {
    // What was accepted can be written, and reads the same again.
    dht::wire::Buffer buffer;
    if (dht::wire::encode(*message, buffer)) {
      const auto again = dht::wire::decode(buffer.bytes());
      if (!again || again->body.index() != message->body.index()) std::abort();
    }
  }
  (void)dht::unpack(dht::Key{}, bytes);
  (void)dht::read_listing(bytes);

  static auto target = std::make_unique<Target>();
  static int inputs = 0;
  if (++inputs % 100'000 == 0) target = std::make_unique<Target>();
  if (size <= dht::kMaxDatagram) {
    target->attacker->send(target->world.host(1).address, bytes);
    target->world.run_for(std::chrono::milliseconds{500});
  }
  return 0;
}
