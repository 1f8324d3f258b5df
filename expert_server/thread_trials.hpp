// Whether fewer compute threads would be faster, found out by trying.
#pragma once

#include <array>

namespace dmoe::expert_server {

/// Corrects a guess of how many threads are best, which is a guess: threads that wait for each other's cores may be
/// slower than fewer of them. So now and then some batches are computed with one thread fewer than usual, or one more
/// up to the guess, and what is found faster again and again becomes the usual. A side that is not faster is tried ever
/// more seldom, so that trials cost a hundredth of the time or so. Never more than the guess: batches are faster, too,
/// with a thread that is taken from somebody else. Counts batches, not seconds. Not thread-safe.
class ThreadTrials {
 public:
  /// For the next batch: 1 to `guess`.
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

  int usual_threads() const noexcept;
  bool possible(const Side& side) const noexcept;
  void usual_batch(double slowness) noexcept;
  void trial_batch(double slowness) noexcept;
  void conclude(double slower) noexcept;
  void forget() noexcept;

  int guess_ = 1;
  int offset_ = 0;  ///< To the guess, at most 0: what was found better.
  double usual_ = 0;
  int usual_batches_ = 0;
  std::array<Side, 2> sides_{Side{-1}, Side{+1}};
  Side* trial_ = nullptr;  ///< Of sides_: under way.
  double trial_sum_ = 0;
  double settling_sum_ = 0;  ///< Of it, the batches that do not count.
  int trial_batches_ = 0;
};

}  // namespace dmoe::expert_server
