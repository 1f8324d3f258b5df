#include "expert_server/large_pages.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

namespace dmoe::expert_server {
namespace {

constexpr std::size_t kWorthIt = 4UL * 1024 * 1024;  ///< Bytes: holds one large page wherever it begins.

}  // namespace

void prefer_large_pages(const at::Tensor& tensor) {
  if (tensor.nbytes() < kWorthIt || !tensor.device().is_cpu()) return;
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<std::uintptr_t>(tensor.data_ptr());
  const auto begin = (address + page - 1) / page * page;
  const auto end = (address + tensor.nbytes()) / page * page;
  (void)::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace dmoe::expert_server
