// How long experts usually take to answer. Private to dmoe/.
#pragma once

#include "net/expert_uid.hpp"

#include <array>
#include <chrono>
#include <cstddef>
#include <mutex>
#include <optional>
#include <unordered_map>

namespace dmoe {

/// Of one direction, all layers of a client together. Thread-safe.
class UsualTimes {
 public:
  using Duration = std::chrono::nanoseconds;
  static constexpr std::size_t kWindow = 16;       ///< Latest calls of an expert that count.
  static constexpr std::size_t kEnough = 8;        ///< With fewer nothing is said about it.
  static constexpr std::size_t kExperts = 16'384;  ///< Beyond it, those that are known already.

  void answered(const ExpertUid& uid, Duration waited) { add(uid, waited); }
  /// It was not waited for any longer. Counts as twice as long: an expert that has become slow is given more time once
  /// a quarter of its calls were given up, while losing one in ten changes nothing.
  void given_up(const ExpertUid& uid, Duration waited) { add(uid, 2 * waited); }
  /// Three quarters of its latest calls took no longer. Empty: too little is known.
  std::optional<Duration> usual(const ExpertUid& uid) const { return percentile(uid, 75); }
  /// Of its latest calls 95 in 100 took no longer. Empty: too little is known.
  std::optional<Duration> at_most(const ExpertUid& uid) const { return percentile(uid, 95); }

 private:
  struct Times {
    std::array<Duration, kWindow> latest{};
    std::size_t count = 0;  ///< Ever.
  };
  void add(const ExpertUid& uid, Duration time);
  std::optional<Duration> percentile(const ExpertUid& uid, std::size_t percent) const;

  mutable std::mutex mutex_;
  std::unordered_map<ExpertUid, Times> experts_;  // Guarded by mutex_.
};

}  // namespace dmoe
