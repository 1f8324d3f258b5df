// What the Kademlia core needs from the world: time, datagrams, randomness, and a way to sign.
#pragma once

#include "dht/address.hpp"
#include "net/identity.hpp"

#include <chrono>
#include <cstdint>
#include <functional>
#include <span>

namespace dmoe::dht {

using TimePoint = std::chrono::steady_clock::time_point;
using Duration = std::chrono::steady_clock::duration;
using TimerId = std::uint64_t;

inline constexpr std::size_t kMaxDatagram = 1'232;  ///< IPv6's minimum MTU less headers: never fragmented.

/// Monotonic time and the strand of one node. Real: AsioClock. Simulated: tests/sim.
class Clock {
 public:
  virtual ~Clock() = default;

  virtual TimePoint now() const = 0;
  /// Milliseconds since 1970 as this machine believes; only for sequence numbers, where a wrong value costs nothing.
  virtual std::uint64_t wall_millis() const = 0;
  /// Runs `action` on the strand, not before `when`. On the strand only.
  virtual TimerId schedule(TimePoint when, std::function<void()> action) = 0;
  virtual void cancel(TimerId timer) = 0;
  /// Runs `action` on the strand after what is queued there now. From any thread.
  virtual void post(std::function<void()> action) = 0;
  virtual bool on_strand() const = 0;
};

/// Sends and receives whole datagrams, unreliably. On the strand only.
class DatagramNetwork {
 public:
  using Receiver = std::function<void(const Address& source, std::span<const std::uint8_t> datagram)>;

  virtual ~DatagramNetwork() = default;

  /// Queues or drops; never blocks, never fails.
  virtual void send(const Address& destination, std::span<const std::uint8_t> datagram) = 0;
  /// The span is valid during the call. An empty receiver stops delivery.
  virtual void on_receive(Receiver receiver) = 0;
};

/// Opens TCP connections for those who ask whether theirs can be reached. On the strand only.
class Dialler {
 public:
  virtual ~Dialler() = default;

  /// Connects and closes at once. `done` learns within kDialLimit or so whether anybody was there.
  virtual void dial(const Address& to, std::function<void(bool connected)> done) = 0;
};

inline constexpr std::chrono::milliseconds kDialLimit{1'500};  ///< Longer than SYN, its first repeat, and the answer.

/// 64 unpredictable bits: transaction ids are nonces.
using RandomSource = std::function<std::uint64_t()>;

/// A node's key, and the check of others' signatures. The simulator signs with a cheap stand-in, so that ten thousand
/// nodes fit one core; everything else uses IdentitySigner.
class Signer {
 public:
  virtual ~Signer() = default;

  virtual const net::PublicKey& public_key() const = 0;
  virtual net::Signature sign(net::Bytes message) const = 0;
  virtual bool verify(const net::PublicKey& key, net::Bytes message, const net::Signature& signature) const = 0;
};

/// Ed25519.
class IdentitySigner final : public Signer {
 public:
  explicit IdentitySigner(net::Identity identity) : identity_(std::move(identity)) {}

  const net::PublicKey& public_key() const override { return identity_.public_key(); }
  net::Signature sign(net::Bytes message) const override { return identity_.sign(message); }
  bool verify(const net::PublicKey& key, net::Bytes message, const net::Signature& signature) const override {
    return net::verify(key, message, signature);
  }

 private:
  net::Identity identity_;
};

}  // namespace dmoe::dht
