#include "expert_server/runtimes.hpp"

#include <algorithm>
#include <iterator>
#include <thread>

namespace dmoe::expert_server {

Runtimes::Runtimes(const std::vector<c10::Device>& devices, const RuntimeOptions& options)
    : devices_(devices.empty() ? std::vector<c10::Device>{c10::kCPU} : devices), experts_(devices_.size()) {
  const auto on_cpu = std::count_if(devices_.begin(), devices_.end(), [](const auto& one) { return one.is_cpu(); });
  for (const auto& device : devices_) {
    auto own = options;
    own.device = device;
    own.sharers = static_cast<int>(on_cpu);
    runtimes_.push_back(std::make_unique<Runtime>(std::move(own)));
  }
}

void Runtimes::place(HostedExpert& expert) {
  {
    const std::lock_guard lock(mutex_);
    const auto least = std::min_element(experts_.begin(), experts_.end());
    const bool anywhere = expert.backend->runs_beside_others();
    expert.runtime = anywhere ? static_cast<std::size_t>(std::distance(experts_.begin(), least)) : 0;
    ++experts_[expert.runtime];
  }
  expert.backend->place(devices_[expert.runtime]);
}

void Runtimes::forget(const HostedExpert& expert) {
  const std::lock_guard lock(mutex_);
  --experts_[expert.runtime];
}

Runtime::Load Runtimes::load() const {
  Runtime::Load all;
  for (const auto& runtime : runtimes_) {
    const auto load = runtime->load();
    all.tasks += load.tasks;
    all.rows += load.rows;
  }
  return all;
}

void Runtimes::stop(std::chrono::milliseconds grace) {
  std::vector<std::thread> stopping;
  for (const auto& runtime : runtimes_) stopping.emplace_back([&runtime, grace] { runtime->stop(grace); });
  for (auto& thread : stopping) thread.join();
}

}  // namespace dmoe::expert_server
