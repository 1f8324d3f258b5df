// Memory for received frames. Clearing fresh pages costs about a third of what the socket's copy costs, so a few large
// blocks that tensors gave back are kept for a while.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace dmoe::net {

struct MemoryBlock {
  std::uint8_t* bytes = nullptr;  ///< 64-byte aligned.
  std::size_t size = 0;
};

/// At least `size` bytes. Pages of a large block are committed when they are first written. Throws std::bad_alloc.
MemoryBlock allocate_frame(std::size_t size);
void free_frame(MemoryBlock block) noexcept;

/// Gives kept blocks that nobody took for `age` back to the system. Servers and clients call it now and then.
void trim_frame_memory(std::chrono::steady_clock::duration age) noexcept;

}  // namespace dmoe::net
