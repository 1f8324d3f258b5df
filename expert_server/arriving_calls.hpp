// The part of the memory budget that calls take while they arrive.
#pragma once

#include "expert_server/memory_budget.hpp"
#include "net/frame_budget.hpp"

#include <memory>

namespace dmoe::expert_server {

/// Frames on their way in, queued and being computed hold at most a quarter of the budget: their answers may need as
/// much, and a batch the other half, so that whatever has arrived can also be answered. Thread-safe.
class ArrivingCalls final : public net::FrameBudget {
 public:
  explicit ArrivingCalls(std::shared_ptr<MemoryBudget> budget);

  Result<Lease> take(std::size_t bytes) override;
  void when_freed(std::function<void()> retry) override;

 private:
  const std::shared_ptr<MemoryBudget> frames_;  ///< A quarter of `all_`, as a budget of its own.
  const std::shared_ptr<MemoryBudget> all_;
};

}  // namespace dmoe::expert_server
