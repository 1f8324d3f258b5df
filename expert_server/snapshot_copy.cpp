#include "expert_server/snapshot_copy.hpp"

#include "expert_server/large_tensor.hpp"

#include <torch/types.h>
#include <torch/utils.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

namespace dmoe::expert_server {
namespace {

#ifdef MADV_POPULATE_WRITE
constexpr int kPopulateWrite = MADV_POPULATE_WRITE;
#else
constexpr int kPopulateWrite = 23;  // Linux 5.14; older kernels refuse it, which is no harm.
#endif

constexpr std::size_t kPopulateAtOnce = 16UL * 1024 * 1024;  ///< Holds the process's memory map for about 1 ms.

}  // namespace

std::vector<NamedTensor> SnapshotCopy::reserve(const std::vector<NamedTensor>& live) {
  const at::NoGradGuard no_grad;
  std::vector<NamedTensor> copies;
  copies.reserve(live.size());
  for (const auto& item : live) {
    auto from = item.tensor.detach().contiguous();
    auto to = large_empty(from.sizes(), from.scalar_type());
    copies.push_back({item.name, to});
    pairs_.push_back({std::move(from), std::move(to)});
  }
  return copies;
}

bool SnapshotCopy::advance(std::size_t bytes) {
  while (next_ < pairs_.size()) {
    const auto& pair = pairs_[next_];
    const auto part = std::min(bytes, pair.from.nbytes() - copied_);
    if (!pair.from.device().is_cpu()) {
      pair.to.copy_(pair.from);  // Devices copy whole tensors, and fast.
    } else if (part > 0) {
      std::memcpy(static_cast<std::uint8_t*>(pair.to.data_ptr()) + copied_,
                  static_cast<const std::uint8_t*>(pair.from.data_ptr()) + copied_, part);
    }
    copied_ += pair.from.device().is_cpu() ? part : pair.from.nbytes();
    bytes -= part;
    if (copied_ < pair.from.nbytes()) return false;
    ++next_;
    copied_ = 0;
  }
  return true;
}

void populate(const std::vector<NamedTensor>& tensors) {
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  for (const auto& item : tensors) {
    const auto begin = reinterpret_cast<std::uintptr_t>(item.tensor.data_ptr());
    const auto first = (begin + page - 1) / page * page;
    const auto last = (begin + item.tensor.nbytes()) / page * page;
    for (auto at = first; at < last; at += kPopulateAtOnce) {
      const auto size = std::min<std::uintptr_t>(kPopulateAtOnce, last - at);
      if (::madvise(reinterpret_cast<void*>(at), size, kPopulateWrite) != 0) return;
    }
  }
}

}  // namespace dmoe::expert_server
