#include "expert_server/snapshot_copy.hpp"

#include "expert_server/large_tensor.hpp"
#include "expert_server/parallel_range.hpp"

#include <torch/types.h>
#include <torch/utils.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

namespace dmoe::expert_server {
namespace {

#ifdef MADV_POPULATE_WRITE
constexpr int kPopulateWrite = MADV_POPULATE_WRITE;
#else
constexpr int kPopulateWrite = 23;  // Linux 5.14; older kernels refuse it, which is no harm.
#endif

/// Whoever maps memory meanwhile waits for this much: well under 1 ms, where the machine has the pages at hand.
constexpr std::size_t kPopulateAtOnce = 2UL * 1024 * 1024;
constexpr std::size_t kCopyGrain = 1UL * 1024 * 1024;  ///< Worth a compute thread.

void copy_part(const at::Tensor& from, const at::Tensor& to, std::size_t first, std::size_t count) {
  auto* target = static_cast<std::uint8_t*>(to.data_ptr()) + first;
  const auto* source = static_cast<const std::uint8_t*>(from.data_ptr()) + first;
  parallel_range(static_cast<std::int64_t>(count), kCopyGrain, [=](std::int64_t begin, std::int64_t end) {
    std::memcpy(target + begin, source + begin, static_cast<std::size_t>(end - begin));
  });
}

}  // namespace

std::vector<NamedTensor> SnapshotCopy::reserve(const std::vector<NamedTensor>& live) {
  std::vector<NamedTensor> copies;
  copies.reserve(live.size());
  for (const auto& item : live) {
    auto to = large_empty(item.tensor.sizes(), item.tensor.scalar_type());
    copies.push_back({item.name, to});
    to_.push_back(std::move(to));
  }
  return copies;
}

bool SnapshotCopy::begin(const std::vector<NamedTensor>& live) {
  const bool fits = std::equal(live.begin(), live.end(), to_.begin(), to_.end(), [](const auto& item, const auto& to) {
    return item.tensor.sizes() == to.sizes() && item.tensor.scalar_type() == to.scalar_type();
  });
  if (!fits) return false;
  const at::NoGradGuard no_grad;
  for (const auto& item : live) from_.push_back(item.tensor.detach().contiguous());
  return true;
}

bool SnapshotCopy::advance(std::size_t bytes) {
  while (next_ < from_.size()) {
    const auto& from = from_[next_];
    const auto part = std::min(bytes, from.nbytes() - copied_);
    if (!from.device().is_cpu()) {
      to_[next_].copy_(from);  // Devices copy whole tensors, and fast.
    } else if (part > 0) {
      copy_part(from, to_[next_], copied_, part);
    }
    copied_ += from.device().is_cpu() ? part : from.nbytes();
    bytes -= part;
    if (copied_ < from.nbytes()) return false;
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
