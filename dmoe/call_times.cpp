#include "dmoe/call_times.hpp"

#include <algorithm>

namespace dmoe {

std::optional<CallTimes::Duration> CallTimes::slow_after(const ExpertUid& uid) const {
  const auto usual_limit = times_.percentile(uid, 95, kEnough);
  if (!usual_limit) return {};
  return std::max<Duration>(2 * *usual_limit, kLeast);
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
