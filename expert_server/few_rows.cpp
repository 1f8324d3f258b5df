#include "expert_server/few_rows.hpp"

#include "expert_server/parallel_range.hpp"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <array>
#include <cstring>
#include <utility>

namespace dmoe::expert_server {
namespace {

constexpr std::int64_t kGrain = 1 << 17;  ///< Weights that are worth a thread.

thread_local bool allowed_here = true;

struct Product {
  const float* x;       ///< [rows, inputs]
  const float* weight;  ///< [outputs, inputs]
  const float* bias;    ///< [outputs]
  float* y;             ///< [rows, outputs]
  std::int64_t inputs;
  std::int64_t outputs;
};

// GCC and clang vectors: of any length, broken down to what the target has.
template <int kLanes>
struct Lanes {
  typedef float Type __attribute__((vector_size(4 * kLanes)));
};

/// Outputs first … first + kBlock of all rows. Each weight is multiplied with all rows while it is in a register.
template <int kRows, int kBlock, int kLanes>
[[gnu::always_inline]] inline void block(const Product& product, std::int64_t first) {
  using Vector = typename Lanes<kLanes>::Type;
  const auto inputs = product.inputs;
  const float* weight = product.weight + first * inputs;
  Vector sums[kBlock][kRows] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= inputs; i += kLanes) {
    Vector x[kRows];
    for (int row = 0; row < kRows; ++row) std::memcpy(&x[row], product.x + row * inputs + i, sizeof(Vector));
    for (int out = 0; out < kBlock; ++out) {
      Vector w;
      std::memcpy(&w, weight + out * inputs + i, sizeof(Vector));
      for (int row = 0; row < kRows; ++row) sums[out][row] += w * x[row];
    }
  }
  for (int out = 0; out < kBlock; ++out) {
    for (int row = 0; row < kRows; ++row) {
      float sum = product.bias[first + out];
      for (int lane = 0; lane < kLanes; ++lane) sum += sums[out][row][lane];
      for (auto rest = i; rest < inputs; ++rest) sum += weight[out * inputs + rest] * product.x[row * inputs + rest];
      product.y[row * product.outputs + first + out] = sum;
    }
  }
}

template <int kRows, int kBlock, int kLanes>
[[gnu::always_inline]] inline void range(const Product& product, std::int64_t begin, std::int64_t end) {
  auto first = begin;
  for (; first + kBlock <= end; first += kBlock) block<kRows, kBlock, kLanes>(product, first);
  for (; first < end; ++first) block<kRows, 1, kLanes>(product, first);
}

using Range = void (*)(const Product&, std::int64_t, std::int64_t);

// Blocks are as large as the registers of the target allow.
template <int kRows>
void plain_range(const Product& product, std::int64_t begin, std::int64_t end) {
  range<kRows, kRows <= 4 ? 2 : 1, 4>(product, begin, end);
}

#if defined(__x86_64__)
template <int kRows>
__attribute__((target("avx2,fma"))) void avx2_range(const Product& product, std::int64_t begin, std::int64_t end) {
  range<kRows, kRows <= 4 ? 2 : 1, 8>(product, begin, end);
}

template <int kRows>
__attribute__((target("avx512f,fma"))) void avx512_range(const Product& product, std::int64_t begin, std::int64_t end) {
  range<kRows, kRows <= 4 ? 4 : 2, 16>(product, begin, end);
}

template <int kRows>
Range best_range() {
  if (__builtin_cpu_supports("avx512f")) return avx512_range<kRows>;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return avx2_range<kRows>;
  return plain_range<kRows>;
}
#else
template <int kRows>
Range best_range() {
  return plain_range<kRows>;
}
#endif

template <int... kIndex>
std::array<Range, kFewRows> best_ranges(std::integer_sequence<int, kIndex...> /*indices*/) {
  return {best_range<kIndex + 1>()...};
}

}  // namespace

bool few_rows(const at::Tensor& x) {
  return allowed_here && !c10::GradMode::is_enabled() && x.dim() == 2 && x.size(0) >= 1 && x.size(0) <= kFewRows &&
         x.is_contiguous() && x.scalar_type() == at::kFloat && x.device().is_cpu();
}

at::Tensor few_rows_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  static const auto ranges = best_ranges(std::make_integer_sequence<int, kFewRows>{});
  auto y = at::empty({x.size(0), weight.size(0)}, x.options());
  const Product product{x.data_ptr<float>(), weight.data_ptr<float>(), bias.data_ptr<float>(),
                        y.data_ptr<float>(), weight.size(1),           weight.size(0)};
  const auto compute = ranges[static_cast<std::size_t>(x.size(0) - 1)];
  parallel_range(product.outputs, 1 + kGrain / (product.inputs + 1),
                 [&](std::int64_t begin, std::int64_t end) { compute(product, begin, end); });
  return y;
}

FewRowsMode::FewRowsMode(bool allowed) noexcept : before_(std::exchange(allowed_here, allowed)) {}
FewRowsMode::~FewRowsMode() { allowed_here = before_; }

}  // namespace dmoe::expert_server
