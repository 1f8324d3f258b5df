#include "dmoe/latest_times.hpp"

#include <algorithm>

namespace dmoe {

void LatestTimes::add(const ExpertUid& uid, Duration time) {
  const std::lock_guard lock(mutex_);
  auto it = experts_.find(uid);
  if (it == experts_.end()) {
    if (experts_.size() >= kExperts) return;
    it = experts_.emplace(uid, Times{}).first;
  }
  auto& times = it->second;
  times.latest[times.count++ % window_] = time;
}

std::optional<LatestTimes::Duration> LatestTimes::percentile(const ExpertUid& uid, std::size_t percent,
                                                             std::size_t enough) const {
  std::array<Duration, kMostWindow> latest;
  std::size_t count = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto it = experts_.find(uid);
    if (it == experts_.end() || it->second.count < enough) return {};
    latest = it->second.latest;
    count = std::min(it->second.count, window_);
  }
  const auto found = latest.begin() + static_cast<std::ptrdiff_t>((count * percent + 99) / 100 - 1);
  std::nth_element(latest.begin(), found, latest.begin() + static_cast<std::ptrdiff_t>(count));
  return *found;
}

}  // namespace dmoe
