#include "bench/copy_meter.hpp"

#include <atomic>

namespace {

std::atomic<std::uint64_t> copied{0};

void add_copied(std::size_t size) noexcept {
  if (size > dmoe::bench::kCountedCopy) copied.fetch_add(size, std::memory_order_relaxed);
}

}  // namespace

// The names that `ld --wrap` gives: calls of memcpy come to __wrap_memcpy, and __real_memcpy is the C library's.
extern "C" {
void* __real_memcpy(void* target, const void* source, std::size_t size);   // NOLINT
void* __real_memmove(void* target, const void* source, std::size_t size);  // NOLINT

void* __wrap_memcpy(void* target, const void* source, std::size_t size) {  // NOLINT
  add_copied(size);
  return __real_memcpy(target, source, size);
}

void* __wrap_memmove(void* target, const void* source, std::size_t size) {  // NOLINT
  add_copied(size);
  return __real_memmove(target, source, size);
}
}

namespace dmoe::bench {

std::uint64_t copied_bytes() noexcept { return copied.load(std::memory_order_relaxed); }

}  // namespace dmoe::bench
