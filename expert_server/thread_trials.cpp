#include "expert_server/thread_trials.hpp"

#include <algorithm>
#include <cmath>

namespace dmoe::expert_server {
namespace {

constexpr int kSettling = 12;       ///< Batches that do not count after each change: callers get used to it.
constexpr int kTrialBatches = 16;   ///< And those that do.
constexpr int kUsualBatches = 32;   ///< Before a trial: what it is compared with.
constexpr int kRehearsals = 2;      ///< Trials of a side that do not count: kernels are made for a number of threads.
constexpr int kTrialsToChange = 3;  ///< And those that do.
constexpr int kShortestPause = 16;  ///< Usual batches between two trials of a side.
constexpr int kLongestPause = 512;
constexpr double kFaster = -0.03;  ///< log(0.97): worth a change.
constexpr double kHopeless = 0.6;  ///< Nearly twice as slow: a few batches are enough.
constexpr int kHopelessBatches = 4;
constexpr double kSpike = 0.8;  ///< A batch that was interrupted says no more than this.
constexpr int kMaxOffset = 2;

}  // namespace

int ThreadTrials::usual_threads() const noexcept { return std::max(guess_ + offset_, 1); }

bool ThreadTrials::possible(const Side& side) const noexcept {
  const int threads = usual_threads() + side.step;
  return threads >= std::max(1, guess_ - kMaxOffset) && threads <= guess_;
}

int ThreadTrials::threads(int guess) noexcept {
  if (guess != guess_) {  // What was under way compares with something else.
    guess_ = guess;
    trial_ = nullptr;
    usual_batches_ = 0;
  }
  return usual_threads() + (trial_ != nullptr ? trial_->step : 0);
}

void ThreadTrials::served(double relative) noexcept {
  if (!(relative > 0)) return;
  const double slowness = std::clamp(std::log(relative), -kSpike, kSpike);
  if (trial_ != nullptr) {
    trial_batch(slowness);
  } else {
    usual_batch(slowness);
  }
}

void ThreadTrials::usual_batch(double slowness) noexcept {
  for (auto& side : sides_) --side.until_next;
  if (++usual_batches_ <= 0) return;
  usual_ += (slowness - usual_) / std::min(usual_batches_, kUsualBatches);
  if (usual_batches_ < kUsualBatches) return;
  for (auto& side : sides_) {
    if (side.until_next > 0 || !possible(side)) continue;
    trial_ = &side;
    trial_sum_ = 0;
    trial_batches_ = 0;
    return;
  }
}

void ThreadTrials::trial_batch(double slowness) noexcept {
  trial_sum_ += slowness;
  ++trial_batches_;
  const double slower = trial_sum_ / trial_batches_ - usual_;
  if (trial_batches_ == kHopelessBatches && slower > kHopeless) return conclude(slower);
  if (trial_batches_ == kSettling) settling_sum_ = trial_sum_;
  if (trial_batches_ == kSettling + kTrialBatches) conclude((trial_sum_ - settling_sum_) / kTrialBatches - usual_);
}

void ThreadTrials::conclude(double slower) noexcept {
  auto& side = *trial_;
  trial_ = nullptr;
  usual_batches_ = -kSettling;
  const int counted = ++side.trials - kRehearsals;
  if (counted > 0) side.slower += (slower - side.slower) / std::min(counted, kTrialsToChange);
  const bool promising = side.slower < kFaster;
  if (counted >= kTrialsToChange && promising) {
    offset_ = usual_threads() + side.step - guess_;
    return forget();
  }
  const bool undecided = counted < kTrialsToChange || promising;
  side.pause = undecided ? kShortestPause : std::clamp(2 * side.pause, kShortestPause, kLongestPause);
  side.until_next = side.pause;
}

/// Of the sides: they are compared with another usual from now on.
void ThreadTrials::forget() noexcept {
  for (auto& side : sides_) side = Side{side.step, 0, 0, 0, kShortestPause};
}

}  // namespace dmoe::expert_server
