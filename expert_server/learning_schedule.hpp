// How the learning rate moves with the number of optimizer steps.
#pragma once

#include "net/error.hpp"

#include <cstdint>
#include <string>

namespace dmoe::expert_server {

enum class ScheduleKind {
  kConstant,  ///< The full rate for ever.
  kLinear,    ///< Falls evenly to 0 at total_steps.
  kCosine,    ///< Falls along half a cosine to 0 at total_steps (Loshchilov and Hutter 2017, without restarts).
};

Result<ScheduleKind> parse_schedule(const std::string& name);
std::string to_string(ScheduleKind kind);

/// Each kind begins with a linear warm-up over `warmup_steps`.
struct LearningSchedule {
  ScheduleKind kind = ScheduleKind::kConstant;
  std::uint64_t warmup_steps = 0;
  std::uint64_t total_steps = 0;  ///< Linear and cosine: where the rate reaches 0; > warmup_steps.

  /// What the learning rate is multiplied with for the step after `steps` steps, from 0 to 1.
  double factor(std::uint64_t steps) const noexcept;

  friend bool operator==(const LearningSchedule&, const LearningSchedule&) = default;
};

/// kInvalidArgument: a decay without an end after its warm-up.
Result<void> check(const LearningSchedule& schedule);

}  // namespace dmoe::expert_server
