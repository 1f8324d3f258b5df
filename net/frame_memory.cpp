#include "net/frame_memory.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <new>
#include <utility>

namespace dmoe::net {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kMapFrom = 1024UL * 1024;       ///< Larger blocks are mapped, so untouched pages cost nothing.
constexpr std::size_t kHugePage = 2UL * 1024 * 1024;  ///< x86-64, and arm64 with 4 KiB base pages.
constexpr std::size_t kPage = 4UL * 1024;
constexpr std::size_t kMostKeptBytes = 160UL * 1024 * 1024;  ///< Two 64 MiB tensors and change.
constexpr std::align_val_t kAlignment{64};                   ///< A cache line; Cap'n Proto needs 8.

std::size_t round_up(std::size_t n, std::size_t unit) { return (n + unit - 1) / unit * unit; }

MemoryBlock map_pages(std::size_t size) {
  size = round_up(size, size >= kHugePage ? kHugePage : kPage);
  void* pages = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) throw std::bad_alloc();
  if (size >= 2 * kHugePage) ::madvise(pages, size, MADV_HUGEPAGE);
  return {static_cast<std::uint8_t*>(pages), size};
}

/// Freed mappings, newest last.
class Kept {
 public:
  /// A block of `size` to twice `size` bytes, or nothing.
  MemoryBlock take(std::size_t size) noexcept {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = count_; i-- > 0;) {
      if (entries_[i].block.size >= size && entries_[i].block.size / 2 <= size) return remove(i);
    }
    return {};
  }

  /// @return what must be unmapped instead.
  std::array<MemoryBlock, 2> keep(MemoryBlock block) noexcept {
    if (block.size > kMostKeptBytes / 2) return {block, {}};
    const std::lock_guard lock(mutex_);
    MemoryBlock evicted;
    if (count_ == entries_.size() || bytes_ + block.size > kMostKeptBytes) evicted = remove(0);
    if (bytes_ + block.size > kMostKeptBytes) return {block, evicted};
    entries_[count_++] = {block, Clock::now()};
    bytes_ += block.size;
    return {evicted, {}};
  }

  /// The oldest block if it is older than `age`.
  MemoryBlock take_older(Clock::duration age) noexcept {
    const std::lock_guard lock(mutex_);
    if (count_ == 0 || Clock::now() - entries_[0].since < age) return {};
    return remove(0);
  }

 private:
  struct Entry {
    MemoryBlock block;
    Clock::time_point since;
  };

  MemoryBlock remove(std::size_t index) noexcept {
    const MemoryBlock block = entries_[index].block;
    std::move(entries_.begin() + static_cast<std::ptrdiff_t>(index) + 1,
              entries_.begin() + static_cast<std::ptrdiff_t>(count_),
              entries_.begin() + static_cast<std::ptrdiff_t>(index));
    --count_;
    bytes_ -= block.size;
    return block;
  }

  std::mutex mutex_;  // Leaf; guards all below.
  std::array<Entry, 16> entries_;
  std::size_t count_ = 0;
  std::size_t bytes_ = 0;
};

/// Never destroyed: tensors of static lifetime may give their memory back after main.
Kept& kept() noexcept {
  static auto* const instance = new Kept;
  return *instance;
}

void unmap(MemoryBlock block) noexcept {
  if (block.bytes != nullptr) ::munmap(block.bytes, block.size);
}

}  // namespace

MemoryBlock allocate_frame(std::size_t size) {
  if (size < kMapFrom) return {static_cast<std::uint8_t*>(::operator new(size, kAlignment)), size};
  const auto again = kept().take(size);
  return again.bytes != nullptr ? again : map_pages(size);
}

void free_frame(MemoryBlock block) noexcept {
  if (block.size < kMapFrom) return ::operator delete(block.bytes, kAlignment);
  for (const auto& surplus : kept().keep(block)) unmap(surplus);
}

void trim_frame_memory(Clock::duration age) noexcept {
  for (;;) {
    const auto block = kept().take_older(age);
    if (block.bytes == nullptr) return;
    unmap(block);
  }
}

}  // namespace dmoe::net
