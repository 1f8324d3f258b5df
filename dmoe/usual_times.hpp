// How long experts usually take to answer. Private to dmoe/.
#pragma once

#include "dmoe/latest_times.hpp"
#include "net/expert_uid.hpp"

#include <chrono>
#include <cstddef>
#include <optional>

namespace dmoe {

/// Of one direction, all layers of a client together. Thread-safe.
class UsualTimes {
 public:
  using Duration = std::chrono::nanoseconds;
  static constexpr std::size_t kWindow = 16;  ///< Latest calls of an expert that count.
  static constexpr std::size_t kEnough = 8;   ///< With fewer nothing is said about it.

  void answered(const ExpertUid& uid, Duration waited) { times_.add(uid, waited); }
  /// It was not waited for any longer. Counts as twice as long: an expert that has become slow is given more time once
  /// a quarter of its calls were given up, while losing one in ten changes nothing.
  void given_up(const ExpertUid& uid, Duration waited) { times_.add(uid, 2 * waited); }
  /// Three quarters of its latest calls took no longer. Empty: too little is known.
  std::optional<Duration> usual(const ExpertUid& uid) const { return times_.percentile(uid, 75, kEnough); }

 private:
  LatestTimes times_{kWindow};
};

}  // namespace dmoe
