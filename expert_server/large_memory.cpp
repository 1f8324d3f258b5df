#include "expert_server/large_memory.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace dmoe::expert_server {
namespace {

constexpr std::size_t kPage = 4UL * 1024;
constexpr std::size_t kLargePage = 2UL * 1024 * 1024;  ///< x86-64, and arm64 with 4 KiB base pages.

std::size_t round_up(std::size_t n, std::size_t unit) { return (n + unit - 1) / unit * unit; }

std::uint8_t* map(std::size_t size) {
  void* pages = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) throw std::bad_alloc();
  return static_cast<std::uint8_t*>(pages);
}

std::uint8_t* rounded_up(std::uint8_t* place, std::size_t unit) {
  return place + (unit - reinterpret_cast<std::uintptr_t>(place) % unit) % unit;
}

/// `size` bytes that begin where a large page does.
std::uint8_t* map_aligned(std::size_t size) {
  auto* const pages = map(size + kLargePage);
  auto* const begin = rounded_up(pages, kLargePage);
  if (begin > pages) ::munmap(pages, static_cast<std::size_t>(begin - pages));
  const auto after = static_cast<std::size_t>(pages + kLargePage - begin);
  if (after > 0) ::munmap(begin + size, after);
  return begin;
}

}  // namespace

LargeMemory::LargeMemory(std::size_t bytes) : size_(round_up(std::max<std::size_t>(bytes, 1), kPage)) {
  bytes_ = size_ < kLargePage ? map(size_) : map_aligned(size_);
  const auto whole = size_ / kLargePage * kLargePage;
  if (whole > 0) (void)::madvise(bytes_, whole, MADV_HUGEPAGE);  // A kernel without them gives usual ones.
}

LargeMemory::~LargeMemory() { ::munmap(bytes_, size_); }

void LargeMemory::release(std::span<std::uint8_t> part) noexcept {
  if (part.size() < kPage) return;
  auto* const begin = rounded_up(part.data(), kPage);
  const auto whole = static_cast<std::size_t>(part.data() + part.size() - begin) / kPage * kPage;
  if (part.data() + part.size() > begin && whole > 0) (void)::madvise(begin, whole, MADV_DONTNEED);
}

}  // namespace dmoe::expert_server
