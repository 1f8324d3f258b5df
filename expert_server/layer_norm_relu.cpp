#include "expert_server/layer_norm_relu.hpp"

#include "expert_server/parallel_range.hpp"

#include <ATen/core/Tensor.h>

#include <cmath>
#include <cstdint>

namespace dmoe::expert_server {
namespace {

constexpr std::int64_t kLanes = 16;  ///< Independent sums, which the compiler may keep in vector registers.

template <class Term>
float sum_over(std::int64_t count, Term term) {
  float lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += term(i + lane);
  }
  for (; i < count; ++i) lanes[0] += term(i);
  float sum = 0;
  for (const float lane : lanes) sum += lane;
  return sum;
}

void normalize_row(float* __restrict__ row, const float* __restrict__ weight, const float* __restrict__ bias,
                   std::int64_t width, float epsilon) {
  const float mean = sum_over(width, [row](std::int64_t i) { return row[i]; }) / static_cast<float>(width);
  const float variance = sum_over(width,
                                  [row, mean](std::int64_t i) {
                                    const float difference = row[i] - mean;
                                    return difference * difference;
                                  }) /
                         static_cast<float>(width);
  const float scale = 1 / std::sqrt(variance + epsilon);
  for (std::int64_t i = 0; i < width; ++i) {
    const float value = (row[i] - mean) * scale * weight[i] + bias[i];
    row[i] = value < 0 ? 0 : value;  // NaN stays NaN, as in torch's relu.
  }
}

}  // namespace

void layer_norm_relu_(at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double epsilon) {
  const auto width = x.size(-1);
  const auto rows = width == 0 ? 0 : x.numel() / width;
  auto* values = x.data_ptr<float>();
  const auto* scales = weight.data_ptr<float>();
  const auto* shifts = bias.data_ptr<float>();
  parallel_range(rows, 1 + (1 << 15) / (width + 1), [&](std::int64_t begin, std::int64_t end) {
    for (auto row = begin; row < end; ++row) {
      normalize_row(values + row * width, scales, shifts, width, static_cast<float>(epsilon));
    }
  });
}

}  // namespace dmoe::expert_server
