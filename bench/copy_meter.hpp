// Counts the bytes that this program copies in memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dmoe::bench {

/// Copies up to this size are not counted: message headers, not payload.
inline constexpr std::size_t kCountedCopy = 512;

/// Bytes that memcpy and memmove have copied so far, in pieces over kCountedCopy. The linker sends every call of them
/// in the code linked into dmoe-bench (dmoe's libraries, Boost, Cap'n Proto's headers) through the meter; the kernel's
/// copies and those inside shared libraries (torch) do not pass here.
std::uint64_t copied_bytes() noexcept;

}  // namespace dmoe::bench
