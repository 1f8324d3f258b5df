// How much memory a command line asks for, before anything is allocated.
#pragma once

#include "cli/serve_options.hpp"

#include "net/error.hpp"

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace dmoe::cli {

/// The most that options take whose real limit is memory: what is asked for is estimated, and refused with the figure.
inline constexpr std::int64_t kMostAskedFor = 1'000'000'000'000'000;

/// Bytes, as doubles: what somebody asks for may not fit any integer. A lower bound: what surely is needed.
struct SizeEstimate {
  double weights = 0;  ///< All experts' parameters with what their optimizer keeps of each.
  double largest = 0;  ///< One full batch: activations kept for its backward pass, and one expert's gradients.
  double total() const { return weights + largest; }
};

/// `experts` experts as `serve` hosts them. Of architectures that it does not know (TorchScript) only rows count.
SizeEstimate size_of_experts(const expert_server::ExpertOptions& options, double experts);

/// What `train` holds itself: its layers around a grid of experts, Adam's state, and one batch.
SizeEstimate size_of_trainer(double features, double hidden_dim, const std::vector<std::int64_t>& grid,
                             double batch_size, double k_best);

/// Memory that this machine has, or the control group of this process allows, in bytes; nothing when neither tells.
/// `root`: of the file system whose proc and sys are read.
std::optional<double> memory_limit(const std::filesystem::path& root = "/");

/// "3.2 TiB"
std::string bytes_text(double bytes);

/// kInvalidArgument when the estimate is above `limit`: "16 experts of kind ffn …: about 6.1 TiB of memory needed
/// (…), and there are 23 GiB; <advice>".
Result<void> check_fits(const std::string& what, const SizeEstimate& estimate, std::optional<double> limit,
                        const std::string& advice);

}  // namespace dmoe::cli
