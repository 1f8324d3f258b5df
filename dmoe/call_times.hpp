// How long experts usually take, and how many extra calls may be made to those who wait for slow ones. Private to
// dmoe/.
#pragma once

#include "dmoe/latest_times.hpp"
#include "net/expert_uid.hpp"

#include <chrono>
#include <cstddef>
#include <mutex>
#include <optional>

namespace dmoe {

/// The forward calls of one client, all layers together. Thread-safe.
class CallTimes {
 public:
  using Duration = std::chrono::nanoseconds;
  static constexpr std::size_t kWindow = 32;  ///< Latest calls of an expert that count.
  static constexpr std::size_t kEnough = 16;  ///< With fewer nothing is said about it.
  /// No call is slow that waited less: it may be this machine that was busy.
  static constexpr std::chrono::milliseconds kLeast{20};
  static constexpr double kBurst = 8;  ///< Extra calls that may be saved up.

  void answered(const ExpertUid& uid, Duration waited) { times_.add(uid, waited); }
  /// From when on a call of this expert is slow: twice the 95th percentile of its latest calls, kLeast at least.
  /// Twice: one in twenty is above the percentile itself, and an extra call for each of those would help little.
  /// Empty: too little is known.
  std::optional<Duration> slow_after(const ExpertUid& uid) const;

  /// `calls` ordinary ones were made, which earn `share` of an extra one each.
  void earn(std::size_t calls, double share);
  /// @return how many of `wanted` extra calls may be made.
  std::size_t spend(std::size_t wanted);

 private:
  LatestTimes times_{kWindow};
  std::mutex mutex_;
  double saved_ = 0;  // Guarded by mutex_.
};

}  // namespace dmoe
