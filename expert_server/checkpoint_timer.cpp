#include "expert_server/checkpoint_timer.hpp"

#include <spdlog/spdlog.h>

#include <condition_variable>
#include <mutex>

namespace dmoe::expert_server {
namespace {

void run(ExpertHost& host, std::chrono::milliseconds period, const std::stop_token& stop) {
  std::mutex mutex;
  std::condition_variable_any never;
  bool failing = false;
  for (;;) {
    {
      std::unique_lock lock(mutex);
      never.wait_for(lock, stop, period, [] { return false; });
    }
    if (stop.stop_requested()) return;
    const auto written = host.checkpoint();
    if (!written) {  // One line a period, whatever number of experts it befell.
      spdlog::error("checkpoints failed and are tried again in {} s, earlier ones are intact: {}",
                    period.count() / 1'000.0, written.error().message);
    } else if (failing) {
      spdlog::info("checkpoints are written again");
    }
    failing = !written;
  }
}

}  // namespace

CheckpointTimer::CheckpointTimer(ExpertHost& host, std::chrono::milliseconds period) {
  if (period.count() <= 0) return;
  thread_ = std::jthread([&host, period](const std::stop_token& stop) { run(host, period, stop); });
}

void CheckpointTimer::stop() {
  thread_.request_stop();
  if (thread_.joinable()) thread_.join();
}

}  // namespace dmoe::expert_server
