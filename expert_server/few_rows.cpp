#include "expert_server/few_rows.hpp"

#include "expert_server/parallel_range.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
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

/// What few_rows_linear_backward computes, of the columns that one thread takes.
struct BackProduct {
  const float* gradient;  ///< [rows, outputs]
  const float* weight;    ///< [outputs, inputs]
  float* x;               ///< [rows, inputs], zeros at first.
  std::int64_t inputs;
  std::int64_t outputs;
};

/// Adds `kBlock` outputs' share. Each weight is multiplied with all rows while it is in a register.
template <int kRows, int kBlock, int kLanes>
[[gnu::always_inline]] inline void back_block(const BackProduct& product, std::int64_t first, std::int64_t begin,
                                              std::int64_t end) {
  using Vector = typename Lanes<kLanes>::Type;
  const float* weight = product.weight + first * product.inputs;
  const float* gradient = product.gradient + first;
  std::int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) {
    Vector w[kBlock];
    for (int out = 0; out < kBlock; ++out) std::memcpy(&w[out], weight + out * product.inputs + i, sizeof(Vector));
    for (int row = 0; row < kRows; ++row) {
      float* x = product.x + row * product.inputs + i;
      Vector sum;
      std::memcpy(&sum, x, sizeof(Vector));
      for (int out = 0; out < kBlock; ++out) sum += w[out] * gradient[row * product.outputs + out];
      std::memcpy(x, &sum, sizeof(Vector));
    }
  }
  for (; i < end; ++i) {
    for (int row = 0; row < kRows; ++row) {
      float sum = product.x[row * product.inputs + i];
      for (int out = 0; out < kBlock; ++out) {
        sum += weight[out * product.inputs + i] * gradient[row * product.outputs + out];
      }
      product.x[row * product.inputs + i] = sum;
    }
  }
}

template <int kRows, int kLanes>
[[gnu::always_inline]] inline void back_range(const BackProduct& product, std::int64_t first, std::int64_t count,
                                              std::int64_t begin, std::int64_t end) {
  const auto last = first + count;
  for (; first + 4 <= last; first += 4) back_block<kRows, 4, kLanes>(product, first, begin, end);
  for (; first < last; ++first) back_block<kRows, 1, kLanes>(product, first, begin, end);
}

template <int kLanes>
[[gnu::always_inline]] inline void outer_row(const OuterProducts& products, std::int64_t output, float* into) {
  using Vector = typename Lanes<kLanes>::Type;
  const float* left = products.left + output;
  std::int64_t i = 0;
  for (; i + 2 * kLanes <= products.inputs; i += 2 * kLanes) {  // Two sums, so that neither waits for itself.
    Vector one = {};
    Vector two = {};
    for (std::int64_t row = 0; row < products.rows; ++row) {
      const float* right = products.right + row * products.inputs + i;
      Vector x;
      std::memcpy(&x, right, sizeof(Vector));
      one += x * left[row * products.outputs];
      std::memcpy(&x, right + kLanes, sizeof(Vector));
      two += x * left[row * products.outputs];
    }
    std::memcpy(into + i, &one, sizeof(Vector));
    std::memcpy(into + i + kLanes, &two, sizeof(Vector));
  }
  for (; i < products.inputs; ++i) {
    float sum = 0;
    for (std::int64_t row = 0; row < products.rows; ++row) {
      sum += products.right[row * products.inputs + i] * left[row * products.outputs];
    }
    into[i] = sum;
  }
}

using Range = void (*)(const Product&, std::int64_t, std::int64_t);
using BackRange = void (*)(const BackProduct&, std::int64_t, std::int64_t, std::int64_t, std::int64_t);
using OuterRow = void (*)(const OuterProducts&, std::int64_t, float*);

/// The kernels for one number of rows, on the processor at hand.
struct Kernels {
  Range there;
  BackRange back;
  OuterRow outer;  ///< For any number.
};

// Blocks are as large as the registers of the target allow.
template <int kRows>
void plain_range(const Product& product, std::int64_t begin, std::int64_t end) {
  range<kRows, kRows <= 4 ? 2 : 1, 4>(product, begin, end);
}
template <int kRows>
void plain_back(const BackProduct& product, std::int64_t first, std::int64_t count, std::int64_t begin,
                std::int64_t end) {
  back_range<kRows, 4>(product, first, count, begin, end);
}
void plain_outer(const OuterProducts& products, std::int64_t output, float* into) {
  outer_row<4>(products, output, into);
}

#if defined(__x86_64__)
template <int kRows>
__attribute__((target("avx2,fma"))) void avx2_range(const Product& product, std::int64_t begin, std::int64_t end) {
  range<kRows, kRows <= 4 ? 2 : 1, 8>(product, begin, end);
}
template <int kRows>
__attribute__((target("avx2,fma"))) void avx2_back(const BackProduct& product, std::int64_t first, std::int64_t count,
                                                   std::int64_t begin, std::int64_t end) {
  back_range<kRows, 8>(product, first, count, begin, end);
}
__attribute__((target("avx2,fma"))) void avx2_outer(const OuterProducts& products, std::int64_t output, float* into) {
  outer_row<8>(products, output, into);
}

template <int kRows>
__attribute__((target("avx512f,fma"))) void avx512_range(const Product& product, std::int64_t begin, std::int64_t end) {
  range<kRows, kRows <= 4 ? 4 : 2, 16>(product, begin, end);
}
template <int kRows>
__attribute__((target("avx512f,fma"))) void avx512_back(const BackProduct& product, std::int64_t first,
                                                        std::int64_t count, std::int64_t begin, std::int64_t end) {
  back_range<kRows, 16>(product, first, count, begin, end);
}
__attribute__((target("avx512f,fma"))) void avx512_outer(const OuterProducts& products, std::int64_t output,
                                                         float* into) {
  outer_row<16>(products, output, into);
}

template <int kRows>
Kernels best_kernels() {
  if (__builtin_cpu_supports("avx512f")) return {avx512_range<kRows>, avx512_back<kRows>, avx512_outer};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return {avx2_range<kRows>, avx2_back<kRows>, avx2_outer};
  }
  return {plain_range<kRows>, plain_back<kRows>, plain_outer};
}
#else
template <int kRows>
Kernels best_kernels() {
  return {plain_range<kRows>, plain_back<kRows>, plain_outer};
}
#endif

/// Rows whose sums fit the registers. More are computed in two turns while the weights are in the cache.
constexpr std::int64_t kRowsAtOnce = 8;
static_assert(kFewRows <= 2 * kRowsAtOnce);
constexpr std::int64_t kOutputsPerTurn = 8;

template <int... kIndex>
std::array<Kernels, kRowsAtOnce> all_kernels(std::integer_sequence<int, kIndex...> /*indices*/) {
  return {best_kernels<kIndex + 1>()...};
}

const Kernels& kernels(std::int64_t rows) {
  static const auto all = all_kernels(std::make_integer_sequence<int, kRowsAtOnce>{});
  return all[static_cast<std::size_t>(rows - 1)];
}

/// Calls `turn(first row, rows)` for at most kRowsAtOnce rows each.
template <class Turn>
void in_turns(std::int64_t rows, Turn turn) {
  for (std::int64_t row = 0; row < rows; row += kRowsAtOnce) turn(row, std::min(kRowsAtOnce, rows - row));
}

}  // namespace

bool few_rows_allowed(const at::Tensor& x) {
  return allowed_here && !c10::GradMode::is_enabled() && x.dim() == 2 && x.size(0) >= 1 && x.is_contiguous() &&
         x.scalar_type() == at::kFloat && x.device().is_cpu();
}

bool few_rows(const at::Tensor& x) { return x.size(0) <= kFewRows && few_rows_allowed(x); }

at::Tensor few_rows_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  auto y = at::empty({x.size(0), weight.size(0)}, x.options());
  const Product product{x.data_ptr<float>(), weight.data_ptr<float>(), bias.data_ptr<float>(),
                        y.data_ptr<float>(), weight.size(1),           weight.size(0)};
  const auto rows = x.size(0);
  parallel_range(product.outputs, 1 + kGrain / (product.inputs + 1), [&](std::int64_t begin, std::int64_t end) {
    if (rows <= kRowsAtOnce) return kernels(rows).there(product, begin, end);
    for (auto first = begin; first < end; first += kOutputsPerTurn) {
      in_turns(rows, [&](std::int64_t row, std::int64_t count) {
        auto part = product;
        part.x += row * product.inputs;
        part.y += row * product.outputs;
        kernels(count).there(part, first, std::min(end, first + kOutputsPerTurn));
      });
    }
  });
  return y;
}

at::Tensor few_rows_linear_backward(const at::Tensor& gradient, const at::Tensor& weight) {
  const auto rows = gradient.size(0);
  auto x = at::zeros({rows, weight.size(1)}, gradient.options());
  const BackProduct product{gradient.data_ptr<float>(), weight.data_ptr<float>(), x.data_ptr<float>(), weight.size(1),
                            weight.size(0)};
  // By columns: each thread has sums of its own.
  parallel_range(product.inputs, std::max<std::int64_t>(64, 1 + kGrain / (product.outputs + 1)),
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t first = 0; first < product.outputs; first += kOutputsPerTurn) {
                     const auto outputs = std::min(kOutputsPerTurn, product.outputs - first);
                     in_turns(rows, [&](std::int64_t row, std::int64_t count) {
                       auto part = product;
                       part.gradient += row * product.outputs;
                       part.x += row * product.inputs;
                       kernels(count).back(part, first, outputs, begin, end);
                     });
                   }
                 });
  return x;
}

void outer_products_row(const OuterProducts& products, std::int64_t output, float* into) {
  kernels(1).outer(products, output, into);
}

FewRowsMode::FewRowsMode(bool allowed) noexcept : before_(std::exchange(allowed_here, allowed)) {}
FewRowsMode::~FewRowsMode() { allowed_here = before_; }

}  // namespace dmoe::expert_server
