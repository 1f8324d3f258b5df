// A snapshot that is copied a piece at a time, so that nobody waits for the whole of it.
#pragma once

#include "expert_server/expert_module.hpp"

#include <cstddef>
#include <vector>

namespace dmoe::expert_server {

/// Live tensors and the memory they are being copied into. Not thread-safe, but see `populate`.
class SnapshotCopy {
 public:
  /// Reserves memory for a copy of each of `live`, without touching it. May throw std::bad_alloc.
  std::vector<NamedTensor> reserve(const std::vector<NamedTensor>& live);

  /// From now on `live` is copied, all that was reserved for, in that order.    @return false: sizes or dtypes differ.
  bool begin(const std::vector<NamedTensor>& live);
  bool begun() const noexcept { return !from_.empty(); }

  /// Copies about `bytes` more, on the calling thread's compute threads. True: that was all.    @pre begun()
  bool advance(std::size_t bytes);

 private:
  std::vector<at::Tensor> to_;
  std::vector<at::Tensor> from_;  ///< As many, once begun.
  std::size_t next_ = 0;          ///< Of them.
  std::size_t copied_ = 0;        ///< Bytes of that one.
};

/// Lets the kernel find the pages of these tensors now, on this thread; their contents, which another thread may be
/// writing, stay as they are. Best effort: without it the first write finds them.
void populate(const std::vector<NamedTensor>& tensors);

}  // namespace dmoe::expert_server
