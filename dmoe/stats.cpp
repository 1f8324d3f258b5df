#include "dmoe/stats.hpp"

#include <algorithm>
#include <cmath>

namespace dmoe {

double RoutingStats::share(const ExpertUid& uid) const {
  double all = 0;
  for (const auto& [expert, count] : chosen) all += static_cast<double>(count);
  const auto it = chosen.find(uid);
  return it == chosen.end() ? 0 : static_cast<double>(it->second) / all;
}

double RoutingStats::coefficient_of_variation() const {
  const auto experts = static_cast<double>(std::max(live_experts, chosen.size()));
  double sum = 0;
  double squares = 0;
  for (const auto& [expert, count] : chosen) {
    sum += static_cast<double>(count);
    squares += static_cast<double>(count) * static_cast<double>(count);
  }
  if (sum == 0) return 0;
  const double mean = sum / experts;
  return std::sqrt(std::max(0.0, squares / experts - mean * mean)) / mean;
}

}  // namespace dmoe
