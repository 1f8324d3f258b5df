// How many extra calls may be made beside slow ones. Private to dmoe/.
#pragma once

#include <algorithm>
#include <cstddef>
#include <mutex>

namespace dmoe {

/// Of one client, all layers together. Thread-safe.
class HedgeBudget {
 public:
  static constexpr double kBurst = 8;  ///< Extra calls that may be saved up.

  /// `calls` ordinary ones were made, which earn `share` of an extra one each.
  void earn(std::size_t calls, double share) {
    const std::lock_guard lock(mutex_);
    saved_ = std::min(kBurst, saved_ + static_cast<double>(calls) * share);
  }

  /// @return how many of `wanted` extra calls may be made.
  std::size_t spend(std::size_t wanted) {
    const std::lock_guard lock(mutex_);
    const auto granted = std::min(wanted, static_cast<std::size_t>(saved_ + 1e-9));
    saved_ -= static_cast<double>(granted);
    return granted;
  }

 private:
  std::mutex mutex_;
  double saved_ = 0;  // Guarded by mutex_.
};

}  // namespace dmoe
