#include "expert_server/large_tensor.hpp"

#include "expert_server/large_memory.hpp"

#include <torch/types.h>

#include <memory>
#include <new>

namespace dmoe::expert_server {
namespace {

constexpr std::size_t kWorthIt = 2UL * 1024 * 1024;

/// A tensor of zeros in memory of its own; undefined when it is too small for that, or the kernel has no more mappings.
at::Tensor in_large_memory(at::IntArrayRef sizes, at::ScalarType dtype) {
  std::size_t bytes = c10::elementSize(dtype);
  for (const auto size : sizes) {
    if (size <= 0 || __builtin_mul_overflow(bytes, static_cast<std::size_t>(size), &bytes)) return {};
  }
  if (bytes < kWorthIt) return {};
  try {
    auto memory = std::make_shared<LargeMemory>(bytes);
    auto* const begin = memory->data();
    return at::from_blob(
        begin, sizes, [memory = std::move(memory)](void*) {}, at::TensorOptions(dtype));
  } catch (const std::bad_alloc&) {
    return {};
  }
}

}  // namespace

at::Tensor large_empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  auto tensor = in_large_memory(sizes, dtype);
  return tensor.defined() ? tensor : at::empty(sizes, dtype);
}

at::Tensor large_zeros(at::IntArrayRef sizes, at::ScalarType dtype) {
  auto tensor = in_large_memory(sizes, dtype);
  return tensor.defined() ? tensor : at::zeros(sizes, dtype);
}

}  // namespace dmoe::expert_server
