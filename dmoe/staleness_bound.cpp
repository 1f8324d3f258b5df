#include "dmoe/staleness_bound.hpp"

namespace dmoe {

bool StalenessBound::holds(const std::multiset<std::uint64_t>& open, std::uint64_t version, std::uint64_t bound) {
  for (const auto seen : open) {
    if (version - seen > bound) return false;
    ++version;
  }
  return true;
}

bool StalenessBound::may_begin(std::uint64_t seen) const {
  auto open = open_;
  open.insert(seen);
  return holds(open, version_, bound_);
}

bool StalenessBound::may_apply(std::uint64_t seen) const {
  auto open = open_;
  open.erase(open.find(seen));
  return holds(open, version_ + 1, bound_);
}

}  // namespace dmoe
