// A layer's sums over all its passes. Private to dmoe/.
#pragma once

#include "dmoe/stats.hpp"

#include <mutex>
#include <utility>
#include <vector>

namespace dmoe {

/// Thread-safe.
class LayerCounters {
 public:
  /// `change(LayerStats&)` under the lock.
  template <class F>
  void update(F&& change) {
    const std::lock_guard lock(mutex_);
    std::forward<F>(change)(stats_);
  }
  void set_last_call(std::vector<CallReport> reports) {
    const std::lock_guard lock(mutex_);
    last_call_ = std::move(reports);
  }
  void add_to_last_call(const std::vector<CallReport>& reports) {
    const std::lock_guard lock(mutex_);
    last_call_.insert(last_call_.end(), reports.begin(), reports.end());
  }
  LayerStats stats() const {
    const std::lock_guard lock(mutex_);
    return stats_;
  }
  std::vector<CallReport> last_call() const {
    const std::lock_guard lock(mutex_);
    return last_call_;
  }

 private:
  mutable std::mutex mutex_;
  LayerStats stats_;                   // Guarded by mutex_.
  std::vector<CallReport> last_call_;  // Guarded by mutex_.
};

}  // namespace dmoe
