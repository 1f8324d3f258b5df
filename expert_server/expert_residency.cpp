#include "expert_server/expert_residency.hpp"

#include <utility>

namespace dmoe::expert_server {

void ExpertResidency::start(std::function<void(const std::shared_ptr<HostedExpert>&)> revive) {
  const std::lock_guard lock(mutex_);
  if (thread_.joinable()) return;
  thread_ = std::jthread([this, work = std::move(revive)](const std::stop_token& token) { run(token, work); });
}

void ExpertResidency::want(const std::shared_ptr<HostedExpert>& expert) {
  const std::lock_guard lock(mutex_);
  if (!queued_.insert(expert.get()).second) return;
  wanted_.push_back(expert);
  changed_.notify_one();
}

void ExpertResidency::stop() {
  std::jthread thread;
  {
    const std::lock_guard lock(mutex_);
    thread = std::move(thread_);
  }
  thread.request_stop();
  if (thread.joinable()) thread.join();
}

void ExpertResidency::run(const std::stop_token& stop,
                          const std::function<void(const std::shared_ptr<HostedExpert>&)>& revive) {
  for (;;) {
    std::shared_ptr<HostedExpert> next;
    {
      std::unique_lock lock(mutex_);
      if (!changed_.wait(lock, stop, [this] { return !wanted_.empty(); })) return;
      if (stop.stop_requested()) return;
      next = std::move(wanted_.front());
      wanted_.pop_front();
      queued_.erase(next.get());
    }
    revive(next);
  }
}

}  // namespace dmoe::expert_server
