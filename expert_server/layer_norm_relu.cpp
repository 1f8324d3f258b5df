#include "expert_server/layer_norm_relu.hpp"

#include "expert_server/parallel_range.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
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

struct Moments {
  float mean;
  float scale;  ///< 1 / standard deviation.
};

Moments moments_of(const float* row, std::int64_t width, float epsilon) {
  const float mean = sum_over(width, [row](std::int64_t i) { return row[i]; }) / static_cast<float>(width);
  const float variance = sum_over(width,
                                  [row, mean](std::int64_t i) {
                                    const float difference = row[i] - mean;
                                    return difference * difference;
                                  }) /
                         static_cast<float>(width);
  return {mean, 1 / std::sqrt(variance + epsilon)};
}

void normalize_row(float* __restrict__ row, const float* __restrict__ weight, const float* __restrict__ bias,
                   std::int64_t width, float epsilon) {
  const auto [mean, scale] = moments_of(row, width, epsilon);
  for (std::int64_t i = 0; i < width; ++i) {
    const float value = (row[i] - mean) * scale * weight[i] + bias[i];
    row[i] = value < 0 ? 0 : value;  // NaN stays NaN, as in torch's relu.
  }
}

float normalize_row_keeping(float* __restrict__ row, const float* __restrict__ weight, const float* __restrict__ bias,
                            float* __restrict__ output, std::int64_t width, float epsilon) {
  const auto [mean, scale] = moments_of(row, width, epsilon);
  for (std::int64_t i = 0; i < width; ++i) {
    row[i] = (row[i] - mean) * scale;
    const float value = row[i] * weight[i] + bias[i];
    output[i] = value < 0 ? 0 : value;
  }
  return scale;
}

/// One row on its way back. What it adds to the parameters' gradients is added.
void back_through_row(float* __restrict__ gradient, const float* __restrict__ normalized,
                      const float* __restrict__ output, const float* __restrict__ weight,
                      float* __restrict__ weight_gradient, float* __restrict__ bias_gradient, std::int64_t width,
                      float scale) {
  for (std::int64_t i = 0; i < width; ++i) {
    const float passed = output[i] <= 0 ? 0 : gradient[i];  // As torch's relu: what is NaN passes.
    weight_gradient[i] += passed * normalized[i];
    bias_gradient[i] += passed;
    gradient[i] = passed * weight[i];
  }
  const auto count = static_cast<float>(width);
  const float mean = sum_over(width, [gradient](std::int64_t i) { return gradient[i]; }) / count;
  const float along =
      sum_over(width, [gradient, normalized](std::int64_t i) { return gradient[i] * normalized[i]; }) / count;
  for (std::int64_t i = 0; i < width; ++i) gradient[i] = scale * (gradient[i] - mean - normalized[i] * along);
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

NormalizedRelu layer_norm_relu_keeping_(at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                                        double epsilon) {
  const auto rows = x.size(0);
  const auto width = x.size(1);
  NormalizedRelu kept{at::empty_like(x), at::empty({rows}, x.options())};
  auto* values = x.data_ptr<float>();
  auto* outputs = kept.output.data_ptr<float>();
  auto* scales = kept.scales.data_ptr<float>();
  for (std::int64_t row = 0; row < rows; ++row) {  // Few: not worth a second thread.
    scales[row] = normalize_row_keeping(values + row * width, weight.data_ptr<float>(), bias.data_ptr<float>(),
                                        outputs + row * width, width, static_cast<float>(epsilon));
  }
  return kept;
}

void layer_norm_relu_backward_(at::Tensor& gradient, const at::Tensor& normalized, const NormalizedRelu& there,
                               const at::Tensor& weight, at::Tensor& weight_gradient, at::Tensor& bias_gradient) {
  const auto width = gradient.size(1);
  auto* weights = weight_gradient.data_ptr<float>();
  auto* biases = bias_gradient.data_ptr<float>();
  std::fill(weights, weights + width, 0.0F);
  std::fill(biases, biases + width, 0.0F);
  for (std::int64_t row = 0; row < gradient.size(0); ++row) {
    back_through_row(gradient.data_ptr<float>() + row * width, normalized.data_ptr<float>() + row * width,
                     there.output.data_ptr<float>() + row * width, weight.data_ptr<float>(), weights, biases, width,
                     there.scales.data_ptr<float>()[row]);
  }
}

}  // namespace dmoe::expert_server
