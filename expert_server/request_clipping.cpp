#include "expert_server/request_clipping.hpp"

#include <ATen/ATen.h>

#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>

namespace dmoe::expert_server {
namespace {

constexpr std::chrono::seconds kLogPeriod{1};

/// Outputs of whole numbers have gradients that are of whole numbers, and teach nothing.
bool teaches(const at::Tensor& gradient) { return gradient.is_floating_point() && gradient.numel() > 0; }

/// In double: the square of a float may exceed float.
double norm_of(const std::vector<at::Tensor>& gradients) {
  double largest = 0;
  for (const auto& gradient : gradients) {
    if (teaches(gradient)) largest = std::max(largest, gradient.abs().max().item<double>());
  }
  if (largest == 0) return 0;
  double squares = 0;
  for (const auto& gradient : gradients) {
    if (!teaches(gradient)) continue;
    const double norm = gradient.div(largest).norm().item<double>();
    squares += norm * norm;
  }
  return largest * std::sqrt(squares);
}

/// Cheap, for the calls that are as they should be: true only if the norm may be over `limit`.
bool may_exceed(const std::vector<at::Tensor>& gradients, double limit) {
  double squares = 0;
  for (const auto& gradient : gradients) {
    if (!teaches(gradient)) continue;
    const double norm = gradient.norm().item<double>();  // Inf when the squares are too large for the type.
    squares += norm * norm;
  }
  return !(std::sqrt(squares) <= limit);
}

bool may_log_now() {
  static std::atomic<std::int64_t> next{0};
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  auto expected = next.load();
  return now.count() >= expected && next.compare_exchange_strong(expected, (now + kLogPeriod).count());
}

}  // namespace

void clip_gradients(Task& task, const std::string& expert) {
  const double limit = kMostGradientPerRow * std::sqrt(static_cast<double>(std::max<std::int64_t>(1, task.rows)));
  if (!may_exceed(task.grad_outputs, limit)) return;
  const double norm = norm_of(task.grad_outputs);
  if (norm <= limit) return;
  task.gradient_divisor = norm / limit;
  for (auto& gradient : task.grad_outputs) {
    if (teaches(gradient)) gradient = gradient.div(task.gradient_divisor);
  }
  if (!may_log_now()) return;
  spdlog::warn("{} sent expert {} a gradient of norm {:.3g} for {} rows: it teaches as one of {:.3g}",
               task.reply->caller(), expert, norm, task.rows, limit);
}

}  // namespace dmoe::expert_server
