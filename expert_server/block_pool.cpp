#include "expert_server/block_pool.hpp"

#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

namespace dmoe::expert_server {
namespace {

constexpr std::size_t kLeastStep = 4'096;  ///< LargeMemory rounds up to this itself.

/// Four sizes to each power of two: batches of a few rows more find the block of those before.
std::size_t rounded_up(std::size_t bytes) {
  const auto step = std::max(std::bit_floor(bytes) / 4, kLeastStep);
  return (bytes + step - 1) / step * step;
}

}  // namespace

void* BlockPool::take(std::size_t bytes) {
  const auto size = rounded_up(std::max<std::size_t>(bytes, 1));
  Memory memory;
  {
    const std::lock_guard lock(mutex_);
    const auto found = idle_.find(size);
    if (found != idle_.end()) {
      memory = std::move(found->second.back().memory);
      found->second.pop_back();
      if (found->second.empty()) idle_.erase(found);
      kept_ -= size;
    }
  }
  if (!memory) memory = std::make_unique<LargeMemory>(size);
  void* const block = memory->data();
  const std::lock_guard lock(mutex_);
  taken_.emplace(block, std::move(memory));
  return block;
}

bool BlockPool::give_back(void* block) noexcept {
  Memory released;  // After the lock.
  const std::lock_guard lock(mutex_);
  const auto found = taken_.find(block);
  if (found == taken_.end()) return false;
  auto memory = std::move(found->second);
  taken_.erase(found);
  const auto size = memory->size();
  if (kept_ + size > most_kept_) {
    released = std::move(memory);
    return true;
  }
  kept_ += size;
  idle_[size].push_back({std::move(memory), Clock::now()});
  return true;
}

void BlockPool::release_unused_since(Clock::time_point before) noexcept {
  std::vector<Memory> released;  // After the lock.
  const std::lock_guard lock(mutex_);
  for (auto size = idle_.begin(); size != idle_.end();) {
    auto& blocks = size->second;
    while (!blocks.empty() && blocks.front().since < before) {
      kept_ -= size->first;
      released.push_back(std::move(blocks.front().memory));
      blocks.pop_front();
    }
    size = blocks.empty() ? idle_.erase(size) : std::next(size);
  }
}

std::size_t BlockPool::kept() const {
  const std::lock_guard lock(mutex_);
  return kept_;
}

}  // namespace dmoe::expert_server
