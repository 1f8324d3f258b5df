#include "dht/address.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace dmoe::dht {
namespace {

constexpr std::array<std::uint8_t, 12> kMappedPrefix{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF};

std::uint64_t mix(std::uint64_t x) noexcept {
  x ^= x >> 33U;
  x *= 0xFF51AFD7ED558CCDULL;
  x ^= x >> 33U;
  x *= 0xC4CEB9FE1A85EC53ULL;
  return x ^ (x >> 33U);
}

std::uint64_t leading(const std::array<std::uint8_t, 16>& ip, std::size_t bytes) noexcept {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < bytes; ++i) value = (value << 8U) | ip[i];
  return value;
}

std::uint32_t v4_of(const Address& address) noexcept {
  std::uint32_t value = 0;
  for (std::size_t i = 12; i < 16; ++i) value = (value << 8U) | address.ip[i];
  return value;
}

bool in_v4(std::uint32_t ip, std::uint32_t network, int bits) noexcept {
  return (ip >> (32 - bits)) == (network >> (32 - bits));
}

}  // namespace

Address Address::v4(std::uint32_t ip, std::uint16_t port) noexcept {
  Address address;
  std::copy(kMappedPrefix.begin(), kMappedPrefix.end(), address.ip.begin());
  for (std::size_t i = 0; i < 4; ++i) address.ip[12 + i] = static_cast<std::uint8_t>(ip >> (24U - 8U * i));
  address.port = port;
  return address;
}

bool Address::is_v4() const noexcept { return std::equal(kMappedPrefix.begin(), kMappedPrefix.end(), ip.begin()); }

bool Address::is_loopback() const noexcept {
  if (is_v4()) return ip[12] == 127;
  return std::all_of(ip.begin(), ip.end() - 1, [](std::uint8_t byte) { return byte == 0; }) && ip[15] == 1;
}

bool Address::is_private() const noexcept {
  if (is_v4()) {
    const std::uint32_t address = v4_of(*this);
    return in_v4(address, 0x0A000000, 8) || in_v4(address, 0xAC100000, 12) || in_v4(address, 0xC0A80000, 16) ||
           in_v4(address, 0xA9FE0000, 16) || in_v4(address, 0x64400000, 10);
  }
  return (ip[0] & 0xFEU) == 0xFC || (ip[0] == 0xFE && (ip[1] & 0xC0U) == 0x80);
}

bool Address::is_unicast() const noexcept {
  if (port == 0) return false;
  if (is_v4()) return ip[12] != 0 && ip[12] < 224;
  return ip[0] != 0xFF && std::any_of(ip.begin(), ip.end(), [](std::uint8_t byte) { return byte != 0; });
}

std::uint64_t Address::subnet() const noexcept { return is_v4() ? v4_of(*this) >> 8U : (1ULL << 63U) | leading(ip, 6); }

std::uint64_t Address::host() const noexcept { return is_v4() ? v4_of(*this) : (1ULL << 63U) | (leading(ip, 8) >> 1U); }

std::string to_string(const Address& address) {
  char text[64];
  if (address.is_v4()) {
    std::snprintf(text, sizeof text, "%u.%u.%u.%u:%u", address.ip[12], address.ip[13], address.ip[14], address.ip[15],
                  address.port);
    return text;
  }
  std::string result = "[";
  for (std::size_t i = 0; i < 16; i += 2) {
    std::snprintf(text, sizeof text, "%s%x", i == 0 ? "" : ":",
                  static_cast<unsigned>(address.ip[i]) << 8U | address.ip[i + 1]);
    result += text;
  }
  std::snprintf(text, sizeof text, "]:%u", address.port);
  return result + text;
}

bool may_name(const Address& source, const Address& named) noexcept {
  if (!named.is_unicast()) return false;
  if (named.is_loopback()) return source.is_loopback();
  if (named.is_private()) return source.is_private() || source.is_loopback();
  return true;
}

}  // namespace dmoe::dht

std::size_t std::hash<dmoe::dht::Address>::operator()(const dmoe::dht::Address& address) const noexcept {
  std::uint64_t high = 0;
  std::uint64_t low = 0;
  std::memcpy(&high, address.ip.data(), 8);
  std::memcpy(&low, address.ip.data() + 8, 8);
  return dmoe::dht::mix(dmoe::dht::mix(high ^ 0x9E3779B97F4A7C15ULL) ^ low ^ (std::uint64_t{address.port} << 48U));
}
