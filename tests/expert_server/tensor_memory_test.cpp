// Large tensors in memory that is used again. In a process that has reused memory, all tests run that way.
#include "expert_server/tensor_memory.hpp"

#include "tests/support/catch.hpp"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <torch/types.h>

#include <cmath>
#include <cstring>

using namespace dmoe::expert_server;

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST_CASE("a large tensor lies where the one before it lay", "[memory]") {
  reuse_tensor_memory();
  reuse_tensor_memory();
  void* place = nullptr;
  {
    const auto first = torch::full({1'024, 1'024}, 3.0F);
    place = first.data_ptr();
  }
  const auto second = torch::zeros({1'000, 1'024});
  CHECK(second.data_ptr() == place);
  CHECK(second.abs().max().item<float>() == 0);
}
#endif

TEST_CASE("memory without a tensor is freed whatever its size", "[memory]") {
  reuse_tensor_memory();
  auto* const allocator = c10::GetCPUAllocator();
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{64}, std::size_t{1} << 20U, std::size_t{40} << 20U}) {
    void* const block = allocator->raw_allocate(bytes);
    std::memset(block, 1, bytes);
    allocator->raw_deallocate(block);
  }
  release_unused_tensor_memory();
}

TEST_CASE("layers of oneDNN work on reused memory", "[memory]") {
  reuse_tensor_memory();
  const auto x = torch::randn({600, 600});
  CHECK(torch::allclose(torch::gelu(x), x * 0.5 * (1 + torch::erf(x / std::sqrt(2.0))), 1e-4, 1e-5));
}
