#include "cli/matrix_speed.hpp"

#include "cli/progress.hpp"

#include <spdlog/spdlog.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <chrono>

namespace dmoe::cli {
namespace {

constexpr std::int64_t kSize = 512;
constexpr int kRepeats = 4;  // The first one also loads the library; others may share the cores for a moment.

}  // namespace

double measure_gigaflops() {
  const torch::NoGradGuard no_grad;
  const torch::Tensor a = torch::full({kSize, kSize}, 0.5F);
  const torch::Tensor b = torch::full({kSize, kSize}, 0.25F);
  constexpr double kOperations = 2.0 * kSize * kSize * kSize;
  double best = 0;
  for (int i = 0; i < kRepeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    (void)torch::mm(a, b);
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    best = std::max(best, kOperations / time.count() / 1e9);
  }
  return best;
}

std::string slow_matrix_warning(double gigaflops) {
  if (gigaflops >= kSlowGigaflops) return {};
  return "matrix products run at " + rounded(gigaflops, 1) +
         " GFLOP/s, which is slow; install the package libopenblas0-pthread (apt-get install libopenblas0-pthread)";
}

void warn_of_slow_matrices() {
  if (const std::string warning = slow_matrix_warning(measure_gigaflops()); !warning.empty()) {
    spdlog::warn("{}", warning);
  }
}

}  // namespace dmoe::cli
