// Proof that a datagram's source address is real: what was sent there comes back.
#pragma once

#include "dht/address.hpp"
#include "dht/environment.hpp"

#include <array>
#include <cstdint>

namespace dmoe::dht {

/// Makes and checks cookies without keeping one per address: a keyed hash of the address under a secret that changes
/// every five minutes; the one before stays good as long again. The cookie is the store token too.
class CookieJar {
 public:
  CookieJar(RandomSource& random, TimePoint now);

  std::uint64_t cookie_for(const Address& address, TimePoint now);
  bool valid(std::uint64_t cookie, const Address& address, TimePoint now);

 private:
  using Secret = std::array<std::uint64_t, 2>;
  void turn(TimePoint now);

  RandomSource& random_;
  Secret current_;
  Secret previous_;
  TimePoint turned_;
};

}  // namespace dmoe::dht
