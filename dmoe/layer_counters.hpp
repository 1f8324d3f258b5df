// A layer's sums over all its passes. Private to dmoe/.
#pragma once

#include "dmoe/stats.hpp"
#include "gating/beam_search.hpp"

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
  /// @param chosen by the experts' index in `choices`. @param entropy summed over the rows.
  void add_choices(const gating::BeamResult& choices, const std::vector<std::uint64_t>& chosen, double entropy) {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < chosen.size(); ++i) {
      if (chosen[i] > 0) routing_.chosen[choices.expert(static_cast<std::uint32_t>(i)).uid] += chosen[i];
    }
    routing_.live_experts = chosen.size();
    routing_.rows += choices.rows();
    routing_.entropy += entropy;
  }
  RoutingStats routing() const {
    const std::lock_guard lock(mutex_);
    auto routing = routing_;
    if (routing.rows > 0) routing.entropy /= static_cast<double>(routing.rows);
    return routing;
  }
  void reset_routing() {
    const std::lock_guard lock(mutex_);
    routing_ = {};
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
  RoutingStats routing_;               // Guarded by mutex_; its entropy is the sum over rows.
};

}  // namespace dmoe
