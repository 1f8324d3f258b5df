// How long the latest calls of each expert took. Private to dmoe/.
#pragma once

#include "net/expert_uid.hpp"

#include <array>
#include <chrono>
#include <cstddef>
#include <mutex>
#include <optional>
#include <unordered_map>

namespace dmoe {

/// Percentiles over the latest times of each expert. Thread-safe. Bounded.
class LatestTimes {
 public:
  using Duration = std::chrono::nanoseconds;
  static constexpr std::size_t kMostWindow = 32;
  static constexpr std::size_t kExperts = 16'384;  ///< Beyond it, those that are known already.

  /// @param window so many latest times of an expert count, kMostWindow at most.
  explicit LatestTimes(std::size_t window) : window_(window) {}

  void add(const ExpertUid& uid, Duration time);
  /// `percent` of the latest times were no longer. Empty: fewer than `enough` are known.
  std::optional<Duration> percentile(const ExpertUid& uid, std::size_t percent, std::size_t enough) const;

 private:
  struct Times {
    std::array<Duration, kMostWindow> latest{};
    std::size_t count = 0;  ///< Ever.
  };

  const std::size_t window_;
  mutable std::mutex mutex_;
  std::unordered_map<ExpertUid, Times> experts_;  // Guarded by mutex_.
};

}  // namespace dmoe
