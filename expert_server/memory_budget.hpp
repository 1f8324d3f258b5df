// How much memory calls may hold together.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>

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
      if (budget_) budget_->used_.fetch_sub(bytes_, std::memory_order_relaxed);
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
    auto used = used_.load(std::memory_order_relaxed);
    do {
      if (bytes > most || used > most - bytes) return lease;
    } while (!used_.compare_exchange_weak(used, used + bytes, std::memory_order_relaxed));
    lease.budget_ = shared_from_this();
    lease.bytes_ = bytes;
    return lease;
  }

  std::uint64_t limit() const noexcept { return limit_; }
  std::uint64_t used() const noexcept { return used_.load(std::memory_order_relaxed); }

 private:
  const std::uint64_t limit_;
  std::atomic<std::uint64_t> used_{0};
};

}  // namespace dmoe::expert_server
