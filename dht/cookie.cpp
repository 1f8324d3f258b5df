#include "dht/cookie.hpp"

#include <bit>
#include <cstring>

namespace dmoe::dht {
namespace {

constexpr std::chrono::minutes kSecretLife{5};

/// SipHash-2-4 (Aumasson, Bernstein 2012) of three words: a keyed hash of a few nanoseconds.
std::uint64_t siphash(const std::array<std::uint64_t, 2>& key, const std::array<std::uint64_t, 3>& message) {
  std::uint64_t v0 = key[0] ^ 0x736F6D6570736575ULL;
  std::uint64_t v1 = key[1] ^ 0x646F72616E646F6DULL;
  std::uint64_t v2 = key[0] ^ 0x6C7967656E657261ULL;
  std::uint64_t v3 = key[1] ^ 0x7465646279746573ULL;
  const auto round = [&] {
    v0 += v1;
    v1 = std::rotl(v1, 13) ^ v0;
    v0 = std::rotl(v0, 32);
    v2 += v3;
    v3 = std::rotl(v3, 16) ^ v2;
    v0 += v3;
    v3 = std::rotl(v3, 21) ^ v0;
    v2 += v1;
    v1 = std::rotl(v1, 17) ^ v2;
    v2 = std::rotl(v2, 32);
  };
  const auto absorb = [&](std::uint64_t word) {
    v3 ^= word;
    round();
    round();
    v0 ^= word;
  };
  for (const std::uint64_t word : message) absorb(word);
  absorb(std::uint64_t{24} << 56U);  // The length, as the function pads.
  v2 ^= 0xFF;
  for (int i = 0; i < 4; ++i) round();
  return v0 ^ v1 ^ v2 ^ v3;
}

std::uint64_t hash_of(const std::array<std::uint64_t, 2>& secret, const Address& address) {
  std::array<std::uint64_t, 3> message{};
  std::memcpy(message.data(), address.ip.data(), 16);
  message[2] = address.port;
  const std::uint64_t hash = siphash(secret, message);
  return hash == 0 ? 1 : hash;  // 0 says "none".
}

}  // namespace

CookieJar::CookieJar(RandomSource& random, TimePoint now)
    : random_(random), current_{random(), random()}, previous_{random(), random()}, turned_(now) {}

void CookieJar::turn(TimePoint now) {
  if (now - turned_ < kSecretLife) return;
  previous_ = now - turned_ < 2 * kSecretLife ? current_ : Secret{random_(), random_()};
  current_ = {random_(), random_()};
  turned_ = now;
}

std::uint64_t CookieJar::cookie_for(const Address& address, TimePoint now) {
  turn(now);
  return hash_of(current_, address);
}

bool CookieJar::valid(std::uint64_t cookie, const Address& address, TimePoint now) {
  turn(now);
  return cookie != 0 && (cookie == hash_of(current_, address) || cookie == hash_of(previous_, address));
}

}  // namespace dmoe::dht
