#include "expert_server/few_rows_training.hpp"

#include "expert_server/adam_range.hpp"
#include "expert_server/few_rows.hpp"
#include "expert_server/parallel_range.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>

namespace dmoe::expert_server {
namespace {

constexpr std::int64_t kWorkOfAThread = 1 << 17;  ///< Weights that are worth a thread.
constexpr std::int64_t kPanel =
    64;  ///< Rows of a weight that are read side by side: few enough for the page table cache.
constexpr std::int64_t kTile = 512;  ///< Numbers of a gradient that are made at once: they stay in the first cache.

// GCC and clang vectors: of any length, broken down to what the target has.
template <int kLanes>
struct Floats {
  typedef float Type __attribute__((vector_size(4 * kLanes)));
};

struct BackProduct {
  const float* gradient;  ///< [rows, outputs]
  const float* weight;    ///< [outputs, inputs]
  float* y;               ///< [rows, inputs], zero at first
  std::int64_t inputs;
  std::int64_t outputs;
};

/// Adds to columns first … first + kVectors * kLanes what the weight's rows top … bottom give.
template <int kRows, int kVectors, int kLanes>
[[gnu::always_inline]] inline void add_columns(const BackProduct& product, std::int64_t first, std::int64_t top,
                                               std::int64_t bottom) {
  using Vector = typename Floats<kLanes>::Type;
  Vector sums[kRows][kVectors];
  for (int row = 0; row < kRows; ++row) {
    std::memcpy(&sums[row], product.y + row * product.inputs + first, sizeof(sums[row]));
  }
  for (auto out = top; out < bottom; ++out) {
    Vector weights[kVectors];
    std::memcpy(&weights, product.weight + out * product.inputs + first, sizeof(weights));
    for (int row = 0; row < kRows; ++row) {
      const float gradient = product.gradient[row * product.outputs + out];
      for (int v = 0; v < kVectors; ++v) sums[row][v] += weights[v] * gradient;
    }
  }
  for (int row = 0; row < kRows; ++row) {
    std::memcpy(product.y + row * product.inputs + first, &sums[row], sizeof(sums[row]));
  }
}

/// Columns begin … end of all rows.
template <int kRows, int kVectors, int kLanes>
[[gnu::always_inline]] inline void back_range(const BackProduct& product, std::int64_t begin, std::int64_t end) {
  for (std::int64_t top = 0; top < product.outputs; top += kPanel) {
    const auto bottom = std::min(product.outputs, top + kPanel);
    auto first = begin;
    for (; first + kVectors * kLanes <= end; first += kVectors * kLanes) {
      add_columns<kRows, kVectors, kLanes>(product, first, top, bottom);
    }
    for (; first < end; ++first) {
      for (auto out = top; out < bottom; ++out) {
        for (int row = 0; row < kRows; ++row) {
          product.y[row * product.inputs + first] +=
              product.gradient[row * product.outputs + out] * product.weight[out * product.inputs + first];
        }
      }
    }
  }
}

struct OuterAdam {
  AdamMemory<float> memory;
  AdamFactors factors;
  const float* left;   ///< [rows, outputs]
  const float* right;  ///< [rows, inputs]
  std::int64_t rows;
  std::int64_t inputs;
  std::int64_t outputs;
};

/// Numbers `first` … `first + count` of the gradient's row `out`.
template <int kLanes>
[[gnu::always_inline]] inline void outer_tile(const OuterAdam& step, std::int64_t out, std::int64_t first,
                                              std::int64_t count, float* tile) {
  using Vector = typename Floats<kLanes>::Type;
  constexpr int kVectors = 4;
  std::int64_t i = 0;
  for (; i + kVectors * kLanes <= count; i += kVectors * kLanes) {
    Vector sums[kVectors] = {};
    for (std::int64_t row = 0; row < step.rows; ++row) {
      const float left = step.left[row * step.outputs + out];
      Vector right[kVectors];
      std::memcpy(&right, step.right + row * step.inputs + first + i, sizeof(right));
      for (int v = 0; v < kVectors; ++v) sums[v] += right[v] * left;
    }
    std::memcpy(tile + i, &sums, sizeof(sums));
  }
  for (; i < count; ++i) {
    float sum = 0;
    for (std::int64_t row = 0; row < step.rows; ++row) {
      sum += step.left[row * step.outputs + out] * step.right[row * step.inputs + first + i];
    }
    tile[i] = sum;
  }
}

/// The weight's rows begin … end.
template <int kLanes>
[[gnu::always_inline]] inline void outer_adam_range(const OuterAdam& step, std::int64_t begin, std::int64_t end) {
  float tile[kTile];
  for (auto out = begin; out < end; ++out) {
    for (std::int64_t first = 0; first < step.inputs; first += kTile) {
      const auto count = std::min(kTile, step.inputs - first);
      outer_tile<kLanes>(step, out, first, count, tile);
      const auto at = out * step.inputs + first;
      const AdamMemory<float> memory{step.memory.weight + at, tile, step.memory.mean + at, step.memory.square + at,
                                     step.memory.largest == nullptr ? nullptr : step.memory.largest + at};
      if (memory.largest != nullptr) {
        adam_range<true>(memory, step.factors, 0, count);
      } else {
        adam_range<false>(memory, step.factors, 0, count);
      }
    }
  }
}

using BackRange = void (*)(const BackProduct&, std::int64_t, std::int64_t);
using AdamRange = void (*)(const OuterAdam&, std::int64_t, std::int64_t);

// Blocks are as large as the registers of the target allow.
template <int kRows>
void plain_back(const BackProduct& product, std::int64_t begin, std::int64_t end) {
  back_range<kRows, kRows <= 4 ? 2 : 1, 4>(product, begin, end);
}
void plain_adam(const OuterAdam& step, std::int64_t begin, std::int64_t end) { outer_adam_range<4>(step, begin, end); }

#if defined(__x86_64__)
template <int kRows>
__attribute__((target("avx2,fma"))) void avx2_back(const BackProduct& product, std::int64_t begin, std::int64_t end) {
  back_range<kRows, kRows <= 4 ? 2 : 1, 8>(product, begin, end);
}
__attribute__((target("avx2,fma"))) void avx2_adam(const OuterAdam& step, std::int64_t begin, std::int64_t end) {
  outer_adam_range<8>(step, begin, end);
}

template <int kRows>
__attribute__((target("avx512f,fma"))) void avx512_back(const BackProduct& product, std::int64_t begin,
                                                        std::int64_t end) {
  back_range<kRows, kRows <= 4 ? 4 : 2, 16>(product, begin, end);
}
__attribute__((target("avx512f,fma,prefer-vector-width=512"))) void avx512_adam(const OuterAdam& step,
                                                                                std::int64_t begin, std::int64_t end) {
  outer_adam_range<16>(step, begin, end);
}

bool has_avx512() { return __builtin_cpu_supports("avx512f"); }
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

template <int kRows>
BackRange best_back() {
  return has_avx512() ? avx512_back<kRows> : has_avx2() ? avx2_back<kRows> : plain_back<kRows>;
}
AdamRange best_adam() { return has_avx512() ? avx512_adam : has_avx2() ? avx2_adam : plain_adam; }
#else
template <int kRows>
BackRange best_back() {
  return plain_back<kRows>;
}
AdamRange best_adam() { return plain_adam; }
#endif

template <int... kIndex>
std::array<BackRange, kFewRows> best_backs(std::integer_sequence<int, kIndex...> /*indices*/) {
  return {best_back<kIndex + 1>()...};
}

/// In double: exact for the squares and products of floats.
template <class Term>
double sum_of(std::int64_t count, Term term) {
  constexpr std::int64_t kSums = 8;  ///< Independent, so that the compiler may keep them in vector registers.
  double sums[kSums] = {};
  std::int64_t i = 0;
  for (; i + kSums <= count; i += kSums) {
    for (std::int64_t s = 0; s < kSums; ++s) sums[s] += term(i + s);
  }
  for (; i < count; ++i) sums[0] += term(i);
  double sum = 0;
  for (const double part : sums) sum += part;
  return sum;
}

double dot(const float* a, const float* b, std::int64_t count) {
  return sum_of(count, [=](std::int64_t i) { return static_cast<double>(a[i]) * static_cast<double>(b[i]); });
}

float mean_of(const float* values, std::int64_t count) {
  return static_cast<float>(sum_of(count, [=](std::int64_t i) { return static_cast<double>(values[i]); }) /
                            static_cast<double>(count));
}

}  // namespace

bool few_cached_rows(const at::Tensor& x, std::int64_t weights) {
  return few_rows(x, weights <= kCachedWeights ? kFewCachedRows : kFewRows);
}

at::Tensor few_rows_apply(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (x.size(0) <= kFewRows) return few_rows_linear(x, weight, bias);
  auto y = at::empty({x.size(0), weight.size(0)}, x.options());
  for (std::int64_t first = 0; first < x.size(0); first += kFewRows) {
    const auto rows = std::min(kFewRows, x.size(0) - first);
    auto part = y.narrow(0, first, rows);
    few_rows_linear_out(part, x.narrow(0, first, rows), weight, bias);
  }
  return y;
}

at::Tensor few_rows_back(const at::Tensor& gradient, const at::Tensor& weight) {
  static const auto backs = best_backs(std::make_integer_sequence<int, kFewRows>{});
  const auto inputs = weight.size(1);
  auto y = at::zeros({gradient.size(0), inputs}, gradient.options());
  for (std::int64_t first = 0; first < gradient.size(0); first += kFewRows) {
    const auto rows = std::min(kFewRows, gradient.size(0) - first);
    const BackProduct product{gradient.data_ptr<float>() + first * weight.size(0), weight.data_ptr<float>(),
                              y.data_ptr<float>() + first * inputs, inputs, weight.size(0)};
    const auto compute = backs[static_cast<std::size_t>(rows - 1)];
    parallel_range(inputs, 1 + kWorkOfAThread / (product.outputs + 1),
                   [&](std::int64_t begin, std::int64_t end) { compute(product, begin, end); });
  }
  return y;
}

double squared_norm(const at::Tensor& left, const at::Tensor& right) {
  const auto rows = left.size(0);
  const auto* lefts = left.data_ptr<float>();
  const auto* rights = right.data_ptr<float>();
  double sum = 0;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t s = 0; s <= r; ++s) {
      const double product = dot(lefts + r * left.size(1), lefts + s * left.size(1), left.size(1)) *
                             dot(rights + r * right.size(1), rights + s * right.size(1), right.size(1));
      sum += r == s ? product : 2 * product;
    }
  }
  return sum < 0 ? 0 : sum;  // Rows that cancel leave rounding errors of either sign.
}

void adam_step(const AdamMemory<float>& memory, const at::Tensor& left, const at::Tensor& right,
               const AdamFactors& factors) {
  static const auto compute = best_adam();
  const OuterAdam step{memory,        factors,     left.data_ptr<float>(), right.data_ptr<float>(), left.size(0),
                       right.size(1), left.size(1)};
  parallel_range(step.outputs, 1 + kWorkOfAThread / (2 * step.inputs + 1),
                 [&](std::int64_t begin, std::int64_t end) { compute(step, begin, end); });
}

NormedRows few_rows_norm_relu(at::Tensor x, const at::Tensor& weight, const at::Tensor& bias, double epsilon) {
  const auto rows = x.size(0);
  const auto width = x.size(1);
  NormedRows result{at::empty({rows, width}, x.options()), std::move(x), at::empty({rows}, weight.options())};
  const auto* scales = weight.data_ptr<float>();
  const auto* shifts = bias.data_ptr<float>();
  for (std::int64_t row = 0; row < rows; ++row) {
    float* const __restrict__ values = result.normalized.data_ptr<float>() + row * width;
    float* const __restrict__ output = result.output.data_ptr<float>() + row * width;
    const float mean = mean_of(values, width);
    for (std::int64_t i = 0; i < width; ++i) values[i] -= mean;
    const double variance = dot(values, values, width) / static_cast<double>(width);
    const auto deviation = static_cast<float>(std::sqrt(variance + epsilon));
    const float factor = 1 / deviation;
    result.deviation.data_ptr<float>()[row] = deviation;
    for (std::int64_t i = 0; i < width; ++i) {
      values[i] *= factor;
      const float value = values[i] * scales[i] + shifts[i];
      output[i] = value < 0 ? 0 : value;  // NaN stays NaN, as in torch's relu.
    }
  }
  return result;
}

NormGradients few_rows_norm_relu_back_(at::Tensor& gradient, const NormedRows& rows, const at::Tensor& weight) {
  const auto width = gradient.size(1);
  NormGradients result{at::zeros({width}, gradient.options()), at::zeros({width}, gradient.options())};
  const auto* scales = weight.data_ptr<float>();
  float* const __restrict__ of_weight = result.weight.data_ptr<float>();
  float* const __restrict__ of_bias = result.bias.data_ptr<float>();
  for (std::int64_t row = 0; row < gradient.size(0); ++row) {
    float* const __restrict__ values = gradient.data_ptr<float>() + row * width;
    const float* const __restrict__ normalized = rows.normalized.data_ptr<float>() + row * width;
    const float* const __restrict__ output = rows.output.data_ptr<float>() + row * width;
    for (std::int64_t i = 0; i < width; ++i) {
      const float inner = output[i] > 0 ? values[i] : 0;
      of_weight[i] += inner * normalized[i];
      of_bias[i] += inner;
      values[i] = inner * scales[i];
    }
    const float mean = mean_of(values, width);
    const auto along = static_cast<float>(dot(values, normalized, width) / static_cast<double>(width));
    const float factor = 1 / rows.deviation.data_ptr<float>()[row];
    for (std::int64_t i = 0; i < width; ++i) values[i] = factor * (values[i] - mean - normalized[i] * along);
  }
  return result;
}

}  // namespace dmoe::expert_server
