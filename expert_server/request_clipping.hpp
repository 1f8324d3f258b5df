// Limits what one call can teach an expert.
#pragma once

#include "expert_server/task.hpp"

#include <string>

namespace dmoe::expert_server {

/// The largest 2-norm of a call's output gradients per row, as root mean square over its rows. A loss that is a mean
/// gives values far below 1, a plain sum over the outputs of a row √(outputs).
inline constexpr double kMostGradientPerRow = 1'000;

/// Shortens the gradients of a backward call that are longer than that, before they meet other callers' rows: one call
/// of 1e30 would otherwise be all that a batch learns from. Only what is learned is limited: the caller gets the
/// gradient of its inputs as it asked for (see Task::gradient_divisor). Logs the caller, at most once a second.
/// @pre the gradients are finite.
void clip_gradients(Task& task, const std::string& expert);

}  // namespace dmoe::expert_server
