#include "expert_server/learning_schedule.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace dmoe::expert_server {

Result<ScheduleKind> parse_schedule(const std::string& name) {
  if (name == "constant") return ScheduleKind::kConstant;
  if (name == "linear") return ScheduleKind::kLinear;
  if (name == "cosine") return ScheduleKind::kCosine;
  return Error{Errc::kInvalidArgument, "unknown schedule " + name + "; known: constant, linear, cosine", {}};
}

std::string to_string(ScheduleKind kind) {
  switch (kind) {
    case ScheduleKind::kConstant: return "constant";
    case ScheduleKind::kLinear: return "linear";
    case ScheduleKind::kCosine: return "cosine";
  }
  return "constant";
}

double LearningSchedule::factor(std::uint64_t steps) const noexcept {
  // The first step already learns: its share is 1 of warmup_steps.
  if (steps < warmup_steps) return static_cast<double>(steps + 1) / static_cast<double>(warmup_steps);
  if (kind == ScheduleKind::kConstant) return 1;
  const double length = static_cast<double>(total_steps - warmup_steps);
  const double gone = std::min(1.0, static_cast<double>(steps - warmup_steps) / length);
  return kind == ScheduleKind::kLinear ? 1 - gone : 0.5 * (1 + std::cos(std::numbers::pi * gone));
}

Result<void> check(const LearningSchedule& schedule) {
  if (schedule.kind == ScheduleKind::kConstant || schedule.total_steps > schedule.warmup_steps) return {};
  return Error{Errc::kInvalidArgument,
               "schedule " + to_string(schedule.kind) + " needs total_steps above warmup_steps (" +
                   std::to_string(schedule.warmup_steps) + "), it is " + std::to_string(schedule.total_steps),
               {}};
}

}  // namespace dmoe::expert_server
