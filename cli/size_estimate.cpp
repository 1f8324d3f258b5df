#include "cli/size_estimate.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <fstream>
#include <numeric>

namespace dmoe::cli {
namespace {

constexpr double kFloat = 4;                ///< Bytes of a float32.
constexpr double kExpertOverhead = 16'384;  ///< Queues, names and metrics of one expert, however small.

/// An argument of the architecture, or its default.
double argument(const expert_server::ExpertOptions& options, const std::string& name, double fallback) {
  const auto found = options.arguments.find(name);
  if (found == options.arguments.end()) return fallback;
  double value = fallback;
  const std::string& text = found->second;
  (void)std::from_chars(text.data(), text.data() + text.size(), value);  // A bad one is reported by the architecture.
  return value;
}

/// Floats of one expert's parameters, and floats kept per row between forward and backward.
struct Floats {
  double parameters = 0;
  double row = 0;
};

Floats floats_of(const expert_server::ExpertOptions& options) {
  const auto h = static_cast<double>(options.hidden_dim);
  const std::string& kind = options.architecture;
  if (kind == "ffn") return {24 * h * h + 25 * h, 18 * h};
  if (kind == "det_dropout") return {4 * h * h + 3 * h, 6 * h};
  if (kind == "lstm") return {8 * h * h + 8 * h, 7 * h};
  if (kind == "transformer") {
    const double inner = argument(options, "feedforward", 4 * h);
    return {4 * h * h + 2 * h * inner + 9 * h + inner, 8 * h + 2 * inner};
  }
  return {0, 2 * h};
}

/// Copies of each parameter that an optimizer keeps beside it.
double optimizer_copies(const expert_server::ExpertOptions& options) {
  if (options.frozen) return 0;
  if (options.optimizer.value_or("adam") == "sgd") return options.momentum.value_or(0) > 0 ? 1 : 0;
  return options.amsgrad.value_or(true) ? 3 : 2;
}

/// The number after `name` in a file of "name: number kB" lines, in bytes.
std::optional<double> kilobytes_in(const std::filesystem::path& file, const std::string& name) {
  std::ifstream lines(file);
  std::string word;
  while (lines >> word) {
    double value = 0;
    if (word == name && lines >> value) return value * 1'024;
    lines.ignore(256, '\n');
  }
  return std::nullopt;
}

/// A file with nothing but a number; "max" is none.
std::optional<double> number_in(const std::filesystem::path& file) {
  std::ifstream stream(file);
  double value = 0;
  return stream >> value && value > 0 ? std::optional(value) : std::nullopt;
}

}  // namespace

SizeEstimate size_of_experts(const expert_server::ExpertOptions& options, double experts) {
  const Floats floats = floats_of(options);
  SizeEstimate estimate;
  estimate.weights = experts * (floats.parameters * kFloat * (1 + optimizer_copies(options)) + kExpertOverhead);
  estimate.largest = static_cast<double>(options.max_batch_size) * floats.row * kFloat +
                     (options.frozen ? 0 : floats.parameters * kFloat);
  return estimate;
}

SizeEstimate size_of_trainer(double features, double hidden_dim, const std::vector<std::int64_t>& grid,
                             double batch_size, double k_best) {
  constexpr double kAdamCopies = 2;
  constexpr double kClasses = 10;
  const double cells = std::accumulate(grid.begin(), grid.end(), 0.0);
  const double parameters = hidden_dim * (features + cells + kClasses + 5) + cells + kClasses;
  SizeEstimate estimate;
  estimate.weights = parameters * kFloat * (1 + kAdamCopies);
  estimate.largest = parameters * kFloat + batch_size * (features + cells + hidden_dim * (6 + 2 * k_best)) * kFloat;
  return estimate;
}

std::optional<double> memory_limit(const std::filesystem::path& root) {
  std::optional<double> least;
  for (const auto& limit :
       {kilobytes_in(root / "proc/meminfo", "MemTotal:"), number_in(root / "sys/fs/cgroup/memory.max"),
        number_in(root / "sys/fs/cgroup/memory/memory.limit_in_bytes")}) {
    if (limit) least = std::min(*limit, least.value_or(*limit));
  }
  return least;
}

std::string bytes_text(double bytes) {
  constexpr std::array<const char*, 7> kUnits{"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  std::size_t unit = 0;
  while (bytes >= 1'024 && unit + 1 < kUnits.size()) {
    bytes /= 1'024;
    ++unit;
  }
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), bytes < 10 && unit > 0 ? "%.1f %s" : "%.0f %s", bytes, kUnits[unit]);
  return text.data();
}

Result<void> check_fits(const std::string& what, const SizeEstimate& estimate, std::optional<double> limit,
                        const std::string& advice) {
  if (!limit || estimate.total() <= *limit) return {};
  return Error{Errc::kInvalidArgument,
               what + ": about " + bytes_text(estimate.total()) + " of memory needed (weights with optimizer " +
                   bytes_text(estimate.weights) + ", a full batch " + bytes_text(estimate.largest) +
                   "), and there are " + bytes_text(*limit) + "; " + advice,
               {}};
}

}  // namespace dmoe::cli
