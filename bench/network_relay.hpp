// A network between trainers and servers that are on one machine: delays and loses WebSocket messages on their way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace dmoe::bench {

/// How a message's delay is drawn. `kWeibull` with shape 1 is the exponential distribution.
enum class DelayLaw { kConstant, kExponential, kWeibull };

/// "constant", "exponential" or "weibull". Throws std::runtime_error for another name.
DelayLaw parse_delay_law(const std::string& name);

struct LinkConditions {
  double delay_ms = 0;  ///< Mean delay of a message, in each direction.
  DelayLaw law = DelayLaw::kExponential;
  double shape = 1;         ///< Of kWeibull.
  double lost_replies = 0;  ///< Share of the server's messages that vanish, 0 to 1.
};

struct RelayCounts {
  std::uint64_t messages = 0;  ///< Both directions, without control frames.
  std::uint64_t lost = 0;
  double mean_delay_ms = 0;  ///< Of what was delivered, as it really was: TCP keeps order, so a late message delays
                             ///< those behind it.
};

/// A TCP relay in front of each of several servers on 127.0.0.1. It knows where WebSocket messages begin, so that each
/// is delayed once, whatever its size, or lost as a whole. A connection's messages keep their order, as TCP's do. At
/// most 64 MiB are held per connection and direction: then it stops reading, and the sender notices. Ping, pong and
/// close are never lost. One thread.
class NetworkRelay {
 public:
  /// Listens for each of `servers` servers, on ports of the system's choice. Starts no thread, so that the process may
  /// still fork; the servers announce `port(i)` as their address.
  NetworkRelay(std::size_t servers, std::uint64_t seed);
  ~NetworkRelay();
  NetworkRelay(const NetworkRelay&) = delete;
  NetworkRelay& operator=(const NetworkRelay&) = delete;

  std::uint16_t port(std::size_t server) const;
  /// Begins to relay; `ports` are the servers' own.
  void start(const std::vector<std::uint16_t>& ports);
  /// Holds for messages that come from now on. Thread-safe.
  void set(const LinkConditions& conditions);
  /// Since the last call. Thread-safe.
  RelayCounts take_counts();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace dmoe::bench
