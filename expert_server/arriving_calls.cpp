#include "expert_server/arriving_calls.hpp"

#include <chrono>
#include <string>
#include <utility>

namespace dmoe::expert_server {
namespace {

constexpr std::chrono::milliseconds kArrivalRetry{50};

/// What a frame holds of both budgets.
struct FrameLease {
  MemoryBudget::Lease of_all;
  MemoryBudget::Lease of_frames;  // Given back first: who waits for it is called when both are free.
};

std::string mib_text(std::uint64_t bytes) { return std::to_string(bytes >> 20U) + " MiB"; }

}  // namespace

ArrivingCalls::ArrivingCalls(std::shared_ptr<MemoryBudget> budget)
    : frames_(std::make_shared<MemoryBudget>(budget->limit() / 4)), all_(std::move(budget)) {}

Result<net::FrameBudget::Lease> ArrivingCalls::take(std::size_t bytes) {
  if (bytes > frames_->limit()) {
    return Error{Errc::kInvalidArgument,
                 "a message of " + mib_text(bytes) + " is more than the " + mib_text(frames_->limit()) +
                     " that max_memory leaves for what arrives at this server: send fewer rows in one call",
                 {}};
  }
  auto lease = std::make_shared<FrameLease>();
  lease->of_frames = frames_->take(bytes);
  if (lease->of_frames) lease->of_all = all_->take(bytes);
  if (lease->of_all) return Lease(std::move(lease));
  return Error{Errc::kOverloaded,
               "calls hold " + mib_text(all_->used()) + " of the " + mib_text(all_->limit()) +
                   " of max_memory, and no room came free in time",
               kArrivalRetry};
}

void ArrivingCalls::when_freed(std::function<void()> retry) { all_->when_freed(std::move(retry)); }

}  // namespace dmoe::expert_server
