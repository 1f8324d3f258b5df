// What `dmoe demo` tells at its end.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace dmoe::cli {

inline constexpr std::chrono::seconds kRecoveryTime{5};  ///< After it steps are to be back at their usual time.

struct DemoReport {
  double test_accuracy = 0;
  std::int64_t steps = 0;
  double seconds = 0;  ///< The whole run, from the first process to the last answer.
  std::size_t experts_start = 0;
  std::size_t experts_end = 0;
  std::int64_t servers_killed = 0;
  std::uint64_t failed_calls = 0;
  std::int64_t failed_steps = 0;
  double usual_step_ms = 0;           ///< Median before the kill.
  double max_step_ms_after_kill = 0;  ///< 0 when nothing was killed.
  double lost_to_kill_ms = 0;    ///< What the steps of kRecoveryTime after the kill took beyond the mean before it.
  double recovered_step_ms = 0;  ///< Median of the steps after that time; 0 when there were none.
};

/// Fills in the fields about the kill from the steps' times. @param killed_before index of the first step after the
/// kill; negative: nothing was killed.
void describe_kill(const std::vector<double>& step_ms, std::int64_t killed_before, DemoReport& report);

void print_table(const DemoReport& report, std::FILE* stream);
/// One line: test_accuracy, steps, seconds, experts_start, experts_end, servers_killed, failed_calls,
/// max_step_ms_after_kill, then the other fields.
std::string to_json(const DemoReport& report);

}  // namespace dmoe::cli
