// Large blocks of memory that are used again and again.
#pragma once

#include "expert_server/large_memory.hpp"

#include <chrono>
#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace dmoe::expert_server {

/// Keeps blocks that are given back for whoever needs one of their size next. The kernel clears every page that it
/// hands out, which took half of the time of an expert's backward calls: their gradients are as large as its weights,
/// and `malloc` asks the kernel anew for each of more than 32 MiB. Thread-safe; no lock is held while the kernel is
/// asked.
class BlockPool {
 public:
  using Clock = std::chrono::steady_clock;

  /// Keeps at most `most_kept` bytes that nobody uses.
  explicit BlockPool(std::size_t most_kept) : most_kept_(most_kept) {}
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  /// At least `bytes`, with anything in them. Rounded up by a fourth at most. May throw std::bad_alloc.
  void* take(std::size_t bytes);
  /// False: it was not taken here, or was given back already.
  bool give_back(void* block) noexcept;
  /// Releases to the kernel what nobody has taken since `before`.
  void release_unused_since(Clock::time_point before) noexcept;

  std::size_t kept() const;  ///< Bytes that nobody uses.

 private:
  using Memory = std::unique_ptr<LargeMemory>;
  struct Idle {
    Memory memory;
    Clock::time_point since;
  };

  const std::size_t most_kept_;
  mutable std::mutex mutex_;
  std::map<std::size_t, std::deque<Idle>> idle_;  // Guarded by mutex_: by size, the one used last at the back.
  std::unordered_map<void*, Memory> taken_;       // Guarded by mutex_.
  std::size_t kept_ = 0;                          // Guarded by mutex_.
};

}  // namespace dmoe::expert_server
