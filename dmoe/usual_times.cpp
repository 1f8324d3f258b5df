#include "dmoe/usual_times.hpp"

#include <algorithm>

namespace dmoe {

void UsualTimes::add(const ExpertUid& uid, Duration time) {
  const std::lock_guard lock(mutex_);
  auto it = experts_.find(uid);
  if (it == experts_.end()) {
    if (experts_.size() >= kExperts) return;
    it = experts_.emplace(uid, Times{}).first;
  }
  auto& times = it->second;
  times.latest[times.count++ % kWindow] = time;
}

std::optional<UsualTimes::Duration> UsualTimes::percentile(const ExpertUid& uid, std::size_t percent) const {
  std::array<Duration, kWindow> latest;
  std::size_t count = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto it = experts_.find(uid);
    if (it == experts_.end() || it->second.count < kEnough) return {};
    latest = it->second.latest;
    count = std::min(it->second.count, kWindow);
  }
  const auto at = latest.begin() + static_cast<std::ptrdiff_t>((count * percent + 99) / 100 - 1);
  std::nth_element(latest.begin(), at, latest.begin() + static_cast<std::ptrdiff_t>(count));
  return *at;
}

}  // namespace dmoe
