// Where torch's large tensors lie.
#pragma once

namespace dmoe::expert_server {

/// From now on this process's CPU tensors of 1 MiB and more are in memory that is used again (BlockPool), whoever makes
/// them; small ones stay with torch's own allocator. At most an eighth of the machine's memory, and 1 GiB, is kept for
/// later. Does nothing under a sanitizer, which could not see who uses what was freed. Thread-safe, once is enough.
void reuse_tensor_memory();

/// Gives the kernel what no tensor has used for 5 s, when the caller has nothing better to do.
void release_unused_tensor_memory() noexcept;

}  // namespace dmoe::expert_server
