#include "expert_server/thread_trials.hpp"

#include <algorithm>
#include <cmath>

namespace dmoe::expert_server {
namespace {

constexpr int kTrialBatches = 4;
constexpr int kUsualBatches = 8;    ///< Before a trial: what it is compared with.
constexpr int kShortestPause = 16;  ///< Usual batches between two trials of a side.
constexpr int kLongestPause = 512;
constexpr int kTrialsToChange = 3;
constexpr double kFaster = -0.04;  ///< log(0.96): worth a change.
constexpr double kHopeless = 0.6;  ///< Nearly twice as slow: two batches are enough.
constexpr double kSpike = 0.8;     ///< A batch that was interrupted says no more than this.
constexpr int kMaxOffset = 2;

}  // namespace

bool ThreadTrials::possible(const Side& side) const noexcept {
  const int threads = std::clamp(guess_ + offset_, 1, most_) + side.step;
  return threads >= 1 && threads <= most_ && std::abs(offset_ + side.step) <= kMaxOffset;
}

int ThreadTrials::threads(int guess) noexcept {
  if (guess != guess_) {  // What was under way compares with something else.
    guess_ = guess;
    trial_ = nullptr;
    usual_batches_ = 0;
  }
  return std::clamp(guess_ + offset_, 1, most_) + (trial_ != nullptr ? trial_->step : 0);
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
  ++usual_batches_;
  usual_ += (slowness - usual_) / std::min(usual_batches_, kUsualBatches);
  for (auto& side : sides_) --side.until_next;
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
  if (trial_batches_ == kTrialBatches || (trial_batches_ > 1 && slower > kHopeless)) conclude(slower);
}

void ThreadTrials::conclude(double slower) noexcept {
  auto& side = *trial_;
  trial_ = nullptr;
  usual_batches_ = 0;
  ++side.trials;
  side.slower += (slower - side.slower) / std::min(side.trials, kTrialsToChange);
  if (side.trials >= kTrialsToChange && side.slower < kFaster) {
    offset_ = std::clamp(guess_ + offset_, 1, most_) + side.step - guess_;
    return forget();
  }
  const bool promising = side.slower < kFaster;
  side.pause = promising ? kShortestPause : std::clamp(2 * side.pause, kShortestPause, kLongestPause);
  side.until_next = side.pause;
}

/// Of the sides: they are compared with another usual from now on.
void ThreadTrials::forget() noexcept {
  for (auto& side : sides_) side = Side{side.step, 0, 0, 0, kShortestPause};
}

}  // namespace dmoe::expert_server
