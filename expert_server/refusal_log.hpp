// Log lines about callers whose calls cannot be computed, as few of them as a person can read.
#pragma once

#include "net/error.hpp"

#include <chrono>
#include <cstddef>
#include <functional>
#include <map>
#include <mutex>
#include <string>

namespace dmoe::expert_server {

/// At most one line a minute for each caller, and kMostLines a minute for all together, whatever they send and however
/// many they are. What was left out is counted in the next line. Thread-safe, bounded.
class RefusalLog {
 public:
  static constexpr std::size_t kMostLines = 6;
  static constexpr std::chrono::seconds kPeriod{60};

  using Clock = std::function<std::chrono::steady_clock::time_point()>;
  explicit RefusalLog(Clock clock = std::chrono::steady_clock::now) : clock_(std::move(clock)) {}

  /// A call of `caller` (its address) was refused as invalid.
  void note(const std::string& caller, const Error& error);

 private:
  using TimePoint = std::chrono::steady_clock::time_point;

  bool may_speak(const std::string& caller, TimePoint now);

  const Clock clock_;
  std::mutex mutex_;
  std::map<std::string, TimePoint> told_;  // Guarded by mutex_, as are all below: when each caller's last line was.
  TimePoint period_began_;
  std::size_t lines_ = 0;     ///< In this period.
  std::size_t left_out_ = 0;  ///< Since the last line.
};

}  // namespace dmoe::expert_server
