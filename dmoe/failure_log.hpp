// Keeps a log readable while peers fail. Private to dmoe/.
#pragma once

#include "net/identity.hpp"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <unordered_map>

namespace dmoe {

/// Decides which failures of servers are worth a line. Failing peers are normal, so that each has fewer and fewer lines
/// while it goes on failing, and all together have a few a minute. What is left out is counted in the next line.
/// Not thread-safe.
class FailureLog {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  static constexpr std::chrono::seconds kFirstPause{10};     ///< After a server's first line; doubles, …
  static constexpr std::chrono::seconds kLongestPause{600};  ///< … to this. A server that is well as long starts anew.
  static constexpr std::size_t kLinesPerMinute = 6;
  static constexpr std::size_t kMostServers = 4'096;  ///< Remembered; then the quietest is forgotten.

  /// What to write about a failure of `server` now; nothing: it is only counted.
  std::optional<std::string> line(const net::PeerId& server, const std::string& text, TimePoint now);
  std::size_t servers() const noexcept { return servers_.size(); }

 private:
  struct Record {
    TimePoint quiet_until;
    std::chrono::seconds pause{0};
  };
  bool is_due(const net::PeerId& server, TimePoint now);

  std::unordered_map<net::PeerId, Record> servers_;
  std::deque<TimePoint> lines_;  // Of the last minute.
  std::uint64_t left_out_ = 0;
};

}  // namespace dmoe
