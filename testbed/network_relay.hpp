// A network between clients and servers that are on one machine: delays and loses WebSocket messages on their way, lets
// through so many bytes a second, and cuts connections that say nothing, as proxies do.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace dmoe::testbed {

/// How a message's delay is drawn. `kWeibull` with shape 1 is the exponential distribution.
enum class DelayLaw { kConstant, kExponential, kWeibull };

/// "constant", "exponential" or "weibull". Throws std::runtime_error for another name.
DelayLaw parse_delay_law(const std::string& name);

struct LinkConditions {
  double delay_ms = 0;  ///< Mean delay of a message, in each direction.
  DelayLaw law = DelayLaw::kExponential;
  double shape = 1;                        ///< Of kWeibull.
  double lost_replies = 0;                 ///< Share of the server's messages that vanish, 0 to 1.
  std::uint64_t bytes_per_second = 0;      ///< Of each connection and direction; 0: as fast as it can.
  std::chrono::milliseconds cut_after{0};  ///< Of silence in both directions, a connection is closed; 0: never.
};

struct RelayCounts {
  std::uint64_t connections = 0;  ///< That clients opened.
  std::uint64_t cut = 0;          ///< Connections closed for their silence.
  std::uint64_t bytes = 0;        ///< That arrived, both directions.
  std::uint64_t control = 0;      ///< Ping, pong and close frames, both directions.
  std::uint64_t messages = 0;     ///< Both directions, without control frames.
  std::uint64_t lost = 0;
  double mean_delay_ms = 0;  ///< Of what was delivered, as it really was: TCP keeps order, so a late message delays
                             ///< those behind it.
};

/// A TCP relay in front of each of several servers on 127.0.0.1; without conditions it passes on every byte at once. It
/// knows where WebSocket messages begin, so that each is delayed once, whatever its size, or lost as a whole. A
/// connection's messages keep their order, as TCP's do. At most 64 MiB are held per connection and direction: then it
/// stops reading, and the sender notices. Ping, pong and close are never lost. Loss here is of whole messages: what
/// loss of packets does to TCP, bench/lossy_wire.hpp shows. One thread.
class NetworkRelay {
 public:
  /// Listens for each of `servers` servers, on ports of the system's choice. Starts no thread, so that the process may
  /// still fork; the servers announce `port(i)` as their address.
  NetworkRelay(std::size_t servers, std::uint64_t seed);
  ~NetworkRelay();
  NetworkRelay(const NetworkRelay&) = delete;
  NetworkRelay& operator=(const NetworkRelay&) = delete;

  std::uint16_t port(std::size_t server) const;
  /// Begins to relay; `ports` are the servers' own. Throws std::runtime_error unless there is one for each server.
  void start(const std::vector<std::uint16_t>& ports);
  /// Holds for what arrives from now on. Thread-safe.
  void set(const LinkConditions& conditions);
  /// Since the beginning or the last reset_counts(). Thread-safe.
  RelayCounts counts() const;
  void reset_counts();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace dmoe::testbed
