#include "expert_server/fresh_weights.hpp"

#include "expert_server/large_tensor.hpp"
#include "expert_server/parallel_range.hpp"
#include "expert_server/uniform_fill.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/utils.h>

#include <cmath>
#include <cstdint>
#include <mutex>
#include <utility>

namespace dmoe::expert_server {
namespace {

thread_local bool draws_weights = true;

std::uint64_t next_seed() {
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
}

at::Tensor drawn(at::IntArrayRef sizes, float bound) {
  auto tensor = large_empty(sizes, at::kFloat);
  if (!draws_weights) return tensor;
  const auto seed = next_seed();
  auto* values = tensor.data_ptr<float>();
  parallel_range(tensor.numel(), 1 << 16,
                 [&](std::int64_t begin, std::int64_t end) { fill_uniform(values, begin, end, seed, bound); });
  return tensor;
}

}  // namespace

FreshLinearImpl::FreshLinearImpl(std::int64_t inputs, std::int64_t outputs) {
  const auto bound = static_cast<float>(1 / std::sqrt(static_cast<double>(inputs)));
  weight = register_parameter("weight", drawn({outputs, inputs}, bound));
  bias = register_parameter("bias", drawn({outputs}, bound));
}

WithoutFreshWeights::WithoutFreshWeights() noexcept : before_(std::exchange(draws_weights, false)) {}
WithoutFreshWeights::~WithoutFreshWeights() { draws_weights = before_; }

}  // namespace dmoe::expert_server
