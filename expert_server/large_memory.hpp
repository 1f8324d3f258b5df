// Memory for weights and files, in large pages where they fit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace dmoe::expert_server {

/// Zeroed memory from the kernel, given back on destruction. What fills large pages (2 MiB) is asked for in such: each
/// first touch of a page costs a fault, on a virtual machine up to 10 µs, and one of 2 MiB replaces 512. The rest is
/// in usual pages, so that nothing is rounded up. May be used by several threads at once.
class LargeMemory {
 public:
  /// Throws std::bad_alloc.
  explicit LargeMemory(std::size_t bytes);
  ~LargeMemory();
  LargeMemory(const LargeMemory&) = delete;
  LargeMemory& operator=(const LargeMemory&) = delete;

  std::uint8_t* data() const noexcept { return bytes_; }  ///< Aligned to kDirectAlignment at least.
  std::size_t size() const noexcept { return size_; }

  /// Gives the whole pages within `part` back before the rest; nobody reads them any more.
  static void release(std::span<std::uint8_t> part) noexcept;

 private:
  std::uint8_t* bytes_;
  std::size_t size_;
};

}  // namespace dmoe::expert_server
