// A peer's Ed25519 key: it names the peer, and signs its DHT records.
#pragma once

#include "net/error.hpp"

#include <array>
#include <compare>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace dmoe::net {

using Bytes = std::span<const std::uint8_t>;
using PublicKey = std::array<std::uint8_t, 32>;  ///< Ed25519, RFC 8032.
using Signature = std::array<std::uint8_t, 64>;  ///< Ed25519, RFC 8032.

/// SHA-256 of an Ed25519 public key. The same 32 bytes are the peer's Kademlia node ID.
struct PeerId {
  std::array<std::uint8_t, 32> bytes{};

  friend auto operator<=>(const PeerId&, const PeerId&) = default;
};

PeerId peer_id_of(const PublicKey& key) noexcept;
std::array<std::uint8_t, 32> sha256(Bytes data) noexcept;

/// 64 lower-case hexadecimal digits.
std::string to_string(const PeerId& id);
/// The first 8 digits, for logs.
std::string short_string(const PeerId& id);
Result<PeerId> parse_peer_id(std::string_view text);

/// Whether `signature` was made over `message` with the secret half of `key`. Thread-safe.
bool verify(const PublicKey& key, Bytes message, const Signature& signature) noexcept;

/// An Ed25519 key pair. Immutable and cheap to copy (copies share the key); every method is thread-safe.
class Identity {
 public:
  /// A fresh key from the operating system's random source.
  static Identity generate();
  /// A key from 32 secret bytes: for tests and simulations that must repeat.
  static Identity from_seed(const std::array<std::uint8_t, 32>& seed);

  /// Reads a PEM (PKCS#8) key file. kNotFound: no such file; kInvalidArgument: not an Ed25519 private key, or
  /// readable by others than its owner.
  static Result<Identity> load(const std::filesystem::path& file);
  /// Reads the file, or makes a key and writes it there with mode 0600 (temporary file, fsync, rename).
  static Result<Identity> load_or_create(const std::filesystem::path& file);
  /// Writes the key to a new file; refuses to replace one.
  Result<void> save_new(const std::filesystem::path& file) const;

  const PublicKey& public_key() const noexcept;
  const PeerId& peer_id() const noexcept;
  Signature sign(Bytes message) const;

 private:
  struct Key;
  explicit Identity(std::shared_ptr<const Key> key);
  std::shared_ptr<const Key> key_;  // Shared: immutable, and every component of a process signs with it.
};

}  // namespace dmoe::net

template <>
struct std::hash<dmoe::net::PeerId> {
  std::size_t operator()(const dmoe::net::PeerId& id) const noexcept {
    std::size_t hash = 0;
    for (std::size_t i = 0; i < sizeof(hash); ++i) hash = (hash << 8U) | id.bytes[i];
    return hash;  // Already uniformly distributed: a SHA-256.
  }
};
