// Which training steps may begin and be applied so that none becomes too stale. Private to dmoe/.
#pragma once

#include <cstdint>
#include <set>

namespace dmoe {

/// Counts the updates of the weights, and the steps that have begun and not ended with the version that each saw. A
/// step's staleness is the number of updates between that version and its own. Belongs to one thread or stands under a
/// lock.
///
/// Steps that are all applied one after the other, those with the oldest version first, are staler the later they come;
/// so a set of steps can be kept within the bound exactly when that order keeps it.
class StalenessBound {
 public:
  explicit StalenessBound(std::uint64_t bound) : bound_(bound) {}

  std::uint64_t version() const noexcept { return version_; }
  std::uint64_t staleness(std::uint64_t seen) const noexcept { return version_ - seen; }
  bool exceeded(std::uint64_t seen) const noexcept { return staleness(seen) > bound_; }

  /// Whether a step that sees `seen` and all others can still be applied within the bound.
  bool may_begin(std::uint64_t seen) const;
  /// Whether all others can, once a step that saw `seen` has been applied. @pre it has begun and not ended
  bool may_apply(std::uint64_t seen) const;

  void begin(std::uint64_t seen) { open_.insert(seen); }
  /// The step that saw `seen` ends without an update.
  void end(std::uint64_t seen) { open_.erase(open_.find(seen)); }
  /// It ends with one.
  void apply(std::uint64_t seen) {
    end(seen);
    ++version_;
  }

 private:
  static bool holds(const std::multiset<std::uint64_t>& open, std::uint64_t version, std::uint64_t bound);

  const std::uint64_t bound_;
  std::uint64_t version_ = 0;
  std::multiset<std::uint64_t> open_;
};

}  // namespace dmoe
