// A long, lossy line between two hosts that are on one machine: real TCP of the kernel, packet by packet.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

namespace dmoe::bench {

struct WireConditions {
  std::chrono::microseconds round_trip{100'000};
  double loss = 0.01;      ///< Share of packets that vanish, each way.
  std::string congestion;  ///< Congestion control of both hosts; empty: the system's.
  std::uint64_t seed = 1;
};

/// Two network namespaces, joined by two TUN devices and a thread that passes packets on late, or not at all. Needs
/// root: the constructor throws std::runtime_error where that, or the congestion control, is missing.
class LossyWire {
 public:
  enum class Host { kClient, kServer };
  static constexpr const char* kClientAddress = "10.83.0.1";
  static constexpr const char* kServerAddress = "10.83.0.2";

  explicit LossyWire(const WireConditions& conditions);
  ~LossyWire();
  LossyWire(const LossyWire&) = delete;
  LossyWire& operator=(const LossyWire&) = delete;

  /// While one lives, the calling thread, and threads that it starts, open their sockets on that host.
  class Stay {
   public:
    Stay(const LossyWire& wire, Host host);
    ~Stay();
    Stay(const Stay&) = delete;
    Stay& operator=(const Stay&) = delete;

   private:
    int before_;
  };

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace dmoe::bench
