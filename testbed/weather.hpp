// What a relay's connections share: the conditions of the moment, what they make of a message, and the counts.
#pragma once

#include "testbed/network_relay.hpp"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <random>

namespace dmoe::testbed {

/// Thread-safe.
class Weather {
 public:
  using Duration = std::chrono::steady_clock::duration;

  explicit Weather(std::uint64_t seed) : random_(seed) {}

  void set(const LinkConditions& conditions);

  struct Fate {
    Duration delay;
    bool lost;
  };
  /// Of the next message; only a reply gets lost.
  Fate draw(bool reply);

  std::chrono::milliseconds cut_after() const;

  // What happened:
  void opened();
  void cut();
  /// @return how long its connection and direction takes for so many bytes.
  Duration arrived(std::size_t bytes);
  void control_frame();
  void delivered(Duration delay);

  RelayCounts counts() const;
  void reset_counts();

 private:
  double draw_delay_ms();

  mutable std::mutex mutex_;
  LinkConditions conditions_;  // Guarded by mutex_, as are the following.
  std::mt19937_64 random_;
  RelayCounts counts_;
  std::uint64_t delivered_ = 0;
  double delay_sum_ms_ = 0;
};

}  // namespace dmoe::testbed
