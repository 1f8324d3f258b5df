// Which experts are to be brought back from disk.
#pragma once

#include "expert_server/runtime.hpp"

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

namespace dmoe::expert_server {

/// A queue of experts that were called while they lay on disk, and the thread that brings them back in that order, so
/// that neither calls nor the device wait for a disk. Thread-safe.
class ExpertResidency {
 public:
  ~ExpertResidency() { stop(); }

  /// Starts the thread, once. `revive` runs on it, for one expert at a time.
  void start(std::function<void(const std::shared_ptr<HostedExpert>&)> revive);
  /// An expert that is queued already keeps its place.
  void want(const std::shared_ptr<HostedExpert>& expert);
  /// Ends the thread, after the expert it is at. Idempotent.
  void stop();

 private:
  void run(const std::stop_token& stop, const std::function<void(const std::shared_ptr<HostedExpert>&)>& revive);

  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<std::shared_ptr<HostedExpert>> wanted_;  // Guarded by mutex_: each at most once.
  std::set<const HostedExpert*> queued_;              // Guarded by mutex_: those of wanted_.
  std::jthread thread_;
};

}  // namespace dmoe::expert_server
