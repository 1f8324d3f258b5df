#include "dmoe/call_times.hpp"

#include <algorithm>

namespace dmoe {

void CallTimes::answered(const ExpertUid& uid, Duration waited) {
  const std::lock_guard lock(mutex_);
  auto it = experts_.find(uid);
  if (it == experts_.end()) {
    if (experts_.size() >= kExperts) return;
    it = experts_.emplace(uid, Times{}).first;
  }
  auto& times = it->second;
  times.latest[times.count++ % kWindow] = waited;
}

std::optional<CallTimes::Duration> CallTimes::slow_after(const ExpertUid& uid) const {
  std::array<Duration, kWindow> latest;
  std::size_t count = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto it = experts_.find(uid);
    if (it == experts_.end() || it->second.count < kEnough) return {};
    latest = it->second.latest;
    count = std::min(it->second.count, kWindow);
  }
  const auto end = latest.begin() + static_cast<std::ptrdiff_t>(count);
  const auto percentile = latest.begin() + static_cast<std::ptrdiff_t>((count * 95 + 99) / 100 - 1);
  std::nth_element(latest.begin(), percentile, end);
  return std::max<Duration>(2 * *percentile, kLeast);
}

void CallTimes::earn(std::size_t calls, double share) {
  const std::lock_guard lock(mutex_);
  saved_ = std::min(kBurst, saved_ + static_cast<double>(calls) * share);
}

std::size_t CallTimes::spend(std::size_t wanted) {
  const std::lock_guard lock(mutex_);
  const auto granted = std::min(wanted, static_cast<std::size_t>(saved_));
  saved_ -= static_cast<double>(granted);
  return granted;
}

}  // namespace dmoe
