// Looking at checkpoint files without a server: what `dmoe checkpoint
// show|verify|export` call.
#pragma once

#include "net/error.hpp"

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace dmoe::expert_server {

struct CheckpointSummary {
  std::filesystem::path file;
  std::uint64_t bytes = 0;
  /// uid, architecture, hidden_dim, arguments, optimizer (JSON), updates, sha256, …, as the file has them.
  std::map<std::string, std::string> metadata;
};

/// Every checkpoint file below `path` (a data directory, an expert's folder, or one file), oldest first within a
/// folder. kNotFound: there is none.
Result<std::vector<std::filesystem::path>> find_checkpoints(const std::filesystem::path& path);

/// Reads the header alone. kInvalidArgument: damaged, or no checkpoint of this program.
Result<CheckpointSummary> show_checkpoint(const std::filesystem::path& file);

/// Reads the whole file and compares the checksum. kInvalidArgument: damaged, saying what is wrong.
Result<void> verify_checkpoint(const std::filesystem::path& file);

/// Writes the expert's weights and buffers alone, under their own names, as a safetensors file for other programs.
/// kUnavailable: `to` exists, or cannot be written.
Result<void> export_checkpoint(const std::filesystem::path& file, const std::filesystem::path& to);

}  // namespace dmoe::expert_server
