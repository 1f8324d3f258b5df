#include "cli/demo_report.hpp"

#include "cli/median.hpp"
#include "cli/progress.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace dmoe::cli {
namespace {

double to_digits(double value, double scale) { return std::round(value * scale) / scale; }

}  // namespace

void describe_kill(const std::vector<double>& step_ms, std::int64_t killed_before, DemoReport& report) {
  const auto count = static_cast<std::int64_t>(step_ms.size());
  const std::int64_t split = killed_before < 0 ? count : std::min(killed_before, count);
  report.usual_step_ms = median({step_ms.begin(), step_ms.begin() + split});
  const double mean_ms =
      split == 0 ? 0 : std::accumulate(step_ms.begin(), step_ms.begin() + split, 0.0) / static_cast<double>(split);
  const double recovery_ms = std::chrono::duration<double, std::milli>(kRecoveryTime).count();
  double since_kill = 0;
  std::vector<double> recovered;
  for (std::int64_t i = split; i < count; ++i) {
    const double time = step_ms[static_cast<std::size_t>(i)];
    report.max_step_ms_after_kill = std::max(report.max_step_ms_after_kill, time);
    if (since_kill < recovery_ms) report.lost_to_kill_ms += time - mean_ms;
    if (since_kill >= recovery_ms) recovered.push_back(time);
    since_kill += time;
  }
  report.lost_to_kill_ms = std::max(0.0, report.lost_to_kill_ms);  // Luck is no gain from a kill.
  report.recovered_step_ms = median(std::move(recovered));
}

void print_table(const DemoReport& report, std::FILE* stream) {
  Table table;
  table.row("test accuracy", rounded(report.test_accuracy * 100, 2) + " %");
  table.row("steps",
            std::to_string(report.steps) +
                (report.failed_steps == 0 ? std::string{} : " (" + std::to_string(report.failed_steps) + " repeated)"));
  table.row("seconds", rounded(report.seconds, 1));
  table.row("live experts", std::to_string(report.experts_end) + " of " + std::to_string(report.experts_start));
  table.row("servers killed", std::to_string(report.servers_killed));
  table.row("failed calls", std::to_string(report.failed_calls));
  table.row("usual step", rounded(report.usual_step_ms, 1) + " ms");
  if (report.servers_killed > 0) {
    table.row("longest step after the kill", rounded(report.max_step_ms_after_kill, 1) + " ms");
    table.row("time lost to the kill", rounded(report.lost_to_kill_ms, 0) + " ms");
    if (report.recovered_step_ms > 0) {
      table.row("step from " + std::to_string(kRecoveryTime.count()) + " s after the kill",
                rounded(report.recovered_step_ms, 1) + " ms");
    }
  }
  table.print(stream);
}

std::string to_json(const DemoReport& report) {
  const nlohmann::ordered_json json{
      {"test_accuracy", report.test_accuracy},
      {"steps", report.steps},
      {"seconds", to_digits(report.seconds, 1e3)},
      {"experts_start", report.experts_start},
      {"experts_end", report.experts_end},
      {"servers_killed", report.servers_killed},
      {"failed_calls", report.failed_calls},
      {"max_step_ms_after_kill", to_digits(report.max_step_ms_after_kill, 1e3)},
      {"failed_steps", report.failed_steps},
      {"usual_step_ms", to_digits(report.usual_step_ms, 1e3)},
      {"lost_to_kill_ms", to_digits(report.lost_to_kill_ms, 1e3)},
      {"recovered_step_ms", to_digits(report.recovered_step_ms, 1e3)},
  };
  return json.dump();
}

}  // namespace dmoe::cli
