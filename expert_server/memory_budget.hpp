// How much memory calls may hold together.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace dmoe::expert_server {

/// A number of bytes that leases are taken from. Thread-safe. Leases keep it alive.
class MemoryBudget : public std::enable_shared_from_this<MemoryBudget> {
 public:
  static constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();

  /// Bytes taken until destruction.
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept : budget_(std::move(other.budget_)), bytes_(std::exchange(other.bytes_, 0)) {}
    Lease& operator=(Lease&& other) noexcept {
      std::swap(budget_, other.budget_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    ~Lease() {
      if (budget_) budget_->give_back(bytes_);
    }
    explicit operator bool() const noexcept { return budget_ != nullptr; }

   private:
    friend class MemoryBudget;
    std::shared_ptr<MemoryBudget> budget_;
    std::uint64_t bytes_ = 0;
  };

  explicit MemoryBudget(std::uint64_t limit) : limit_(limit) {}

  /// False (see Lease): together with what others hold, less than `left_over` would remain.
  Lease take(std::uint64_t bytes, std::uint64_t left_over = 0) {
    Lease lease;
    const auto most = limit_ - std::min(limit_, left_over);
    auto used = used_.load();
    do {
      if (bytes > most || used > most - bytes) return lease;
    } while (!used_.compare_exchange_weak(used, used + bytes));
    lease.budget_ = shared_from_this();
    lease.bytes_ = bytes;
    return lease;
  }

  /// Calls `retry` once when bytes are given back, on whatever thread does that. A `take` that failed is to be tried
  /// again after this call: what was given back before it calls nobody.
  void when_freed(std::function<void()> retry) {
    Waiting crowd;  // Most of so many are gone by now; those that are not come back.
    {
      const std::lock_guard lock(mutex_);
      if (waiting_.size() >= kMostWaiting) crowd.swap(waiting_);
      waiting_.push_back(std::move(retry));
      anybody_waits_ = true;
    }
    for (const auto& waiter : crowd) waiter();
  }

  std::uint64_t limit() const noexcept { return limit_; }
  std::uint64_t used() const noexcept { return used_.load(); }

 private:
  using Waiting = std::vector<std::function<void()>>;
  static constexpr std::size_t kMostWaiting = 16'384;

  void give_back(std::uint64_t bytes) {
    used_ -= bytes;
    if (!anybody_waits_) return;  // Sequentially consistent: either this sees who waits, or they see what is free.
    Waiting waiting;
    {
      const std::lock_guard lock(mutex_);
      waiting.swap(waiting_);
      anybody_waits_ = false;
    }
    for (const auto& waiter : waiting) waiter();
  }

  const std::uint64_t limit_;
  std::atomic<std::uint64_t> used_{0};
  std::atomic<bool> anybody_waits_{false};
  std::mutex mutex_;  // Leaf; guards waiting_.
  Waiting waiting_;
};

}  // namespace dmoe::expert_server
