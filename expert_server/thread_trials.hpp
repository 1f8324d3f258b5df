// Whether a compute thread more or less would be faster, found out by trying.
#pragma once

#include <array>

namespace dmoe::expert_server {

/// Corrects a guess of how many threads are best. Which cores are free says little where the load comes from our own
/// callers, who work when we do not: so now and then some batches are computed with a thread more or less than usual,
/// and what is found faster again and again becomes the usual. A side that is not faster is tried ever more seldom, so
/// that trials cost a hundredth of the time or so. Counts batches, not seconds. Not thread-safe.
class ThreadTrials {
 public:
  /// Never more than `most` threads.
  explicit ThreadTrials(int most) noexcept : most_(most) {}

  /// For the next batch.    @param guess  1 to `most`
  int threads(int guess) noexcept;

  /// The batch took `relative` times as long as its like do. Batches of which that is not known are not reported.
  void served(double relative) noexcept;

 private:
  /// One fewer, or one more.
  struct Side {
    int step;
    double slower = 0;  ///< Moving average of log(time / usual time).
    int trials = 0;
    int pause = 0;  ///< Usual batches between two trials.
    int until_next = 0;
  };

  bool possible(const Side& side) const noexcept;
  void usual_batch(double slowness) noexcept;
  void trial_batch(double slowness) noexcept;
  void conclude(double slower) noexcept;
  void forget() noexcept;

  const int most_;
  int guess_ = 1;
  int offset_ = 0;  ///< What was found better than the guess.
  double usual_ = 0;
  int usual_batches_ = 0;
  std::array<Side, 2> sides_{Side{-1}, Side{+1}};
  Side* trial_ = nullptr;  ///< Of sides_: under way.
  double trial_sum_ = 0;
  double settling_sum_ = 0;  ///< Of it, the batches that do not count.
  int trial_batches_ = 0;
};

}  // namespace dmoe::expert_server
