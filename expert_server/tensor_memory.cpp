#include "expert_server/tensor_memory.hpp"

#include "expert_server/block_pool.hpp"

#include <c10/core/CPUAllocator.h>
#include <torch/version.h>

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace dmoe::expert_server {
namespace {

constexpr std::size_t kLargeTensor = 1UL << 20U;
constexpr std::size_t kMostKept = 1UL << 30U;
constexpr std::chrono::seconds kUnused{5};

std::size_t most_kept() {
  const auto machine =
      static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return std::min(kMostKept, machine / 8);
}

/// Never destroyed: tensors may outlive what has static storage.
BlockPool& pool() {
  static auto& blocks = *new BlockPool(most_kept());
  return blocks;
}

void give_back(void* block) { pool().give_back(block); }

/// For those who, as oneDNN's layers, allocate without a DataPtr: of any size.
void give_back_or_free(void* block) {
  if (!pool().give_back(block)) c10::GetDefaultCPUAllocator()->raw_deallocate(block);
}

class ReusingAllocator final : public c10::Allocator {
 public:
  c10::DeleterFnPtr raw_deleter() const override { return &give_back_or_free; }
#if TORCH_VERSION_MAJOR >= 2
  c10::DataPtr allocate(std::size_t bytes) override { return make(bytes); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
#else
  c10::DataPtr allocate(std::size_t bytes) const override { return make(bytes); }
#endif

 private:
  static c10::DataPtr make(std::size_t bytes) {
    if (bytes < kLargeTensor) return c10::GetDefaultCPUAllocator()->allocate(bytes);
    void* const block = pool().take(bytes);
    return {block, block, &give_back, c10::Device(c10::kCPU)};
  }
};

}  // namespace

void reuse_tensor_memory() {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  static std::once_flag once;
  std::call_once(once, [] { c10::SetCPUAllocator(new ReusingAllocator, /*priority=*/1); });
#endif
}

void release_unused_tensor_memory() noexcept { pool().release_unused_since(BlockPool::Clock::now() - kUnused); }

}  // namespace dmoe::expert_server
