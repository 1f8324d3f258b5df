#include "expert_server/expert_size.hpp"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string>

namespace dmoe::expert_server {
namespace {

double argument(const ExpertOptions& options, const std::string& name, double fallback) {
  const auto found = options.arguments.find(name);
  if (found == options.arguments.end()) return fallback;
  double value = fallback;
  const auto& text = found->second;
  (void)std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

/// Weights of the large matrices; biases and norms do not matter here. In double: nothing overflows.
double parameters(const ExpertOptions& options) {
  const auto h = static_cast<double>(options.hidden_dim);
  if (options.architecture == "ffn") return 24 * h * h;  // h*4h + 4h*4h + 4h*h.
  if (options.architecture == "transformer") return 4 * h * h + 2 * h * argument(options, "feedforward", 4 * h);
  if (options.architecture == "lstm") return 8 * h * h;
  if (options.architecture == "det_dropout") return 4 * h * h;
  return 0;
}

/// Numbers kept for each weight beside itself and, while it learns, its gradient.
double states(const ExpertOptions& options) {
  if (options.frozen) return 0;
  if (options.optimizer.value_or("adam") == "sgd") return 1 + (options.momentum.value_or(0) > 0 ? 1 : 0);
  return options.amsgrad.value_or(true) ? 4 : 3;
}

std::string gib(double bytes) {
  auto text = std::to_string(bytes / (1UL << 30U));
  return text.substr(0, text.find('.') + 2) + " GiB";
}

}  // namespace

std::uint64_t estimated_expert_bytes(const ExpertOptions& options) {
  return static_cast<std::uint64_t>(std::min(1e18, parameters(options) * 4 * (1 + states(options))));
}

Result<void> check_fits_memory(const ExpertOptions& options, std::uint64_t count) {
  const double needed = static_cast<double>(estimated_expert_bytes(options)) * static_cast<double>(count);
  const double memory = static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGESIZE));
  if (memory <= 0 || needed <= memory) return {};
  return Error{Errc::kInvalidArgument,
               std::to_string(count) + " experts " + options.architecture + " of hidden_dim " +
                   std::to_string(options.hidden_dim) + " take about " + gib(needed) +
                   " with their optimizer, this machine has " + gib(memory) +
                   ": host fewer or smaller ones, or keep fewer in memory (max_resident_experts)",
               {}};
}

}  // namespace dmoe::expert_server
