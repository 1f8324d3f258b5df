#include "expert_server/checkpoint_files.hpp"

#include "expert_server/checkpoint_store.hpp"
#include "expert_server/safetensors.hpp"

#include <algorithm>
#include <system_error>
#include <utility>

namespace dmoe::expert_server {

namespace fs = std::filesystem;

Result<std::vector<fs::path>> find_checkpoints(const fs::path& path) {
  std::vector<fs::path> files;
  std::error_code code;
  if (fs::is_regular_file(path, code)) return std::vector<fs::path>{path};
  for (fs::recursive_directory_iterator at(path, code), end; !code && at != end; at.increment(code)) {
    std::error_code ignored;
    if (is_checkpoint_name(at->path().filename().string()) && at->is_regular_file(ignored)) files.push_back(at->path());
  }
  if (files.empty()) {
    const auto reason = code ? ": " + code.message() : std::string();
    return Error{Errc::kNotFound, "there is no checkpoint in " + path.string() + reason, {}};
  }
  std::sort(files.begin(), files.end());
  return files;
}

Result<CheckpointSummary> show_checkpoint(const fs::path& file) {
  auto metadata = read_safetensors_metadata(file);
  if (!metadata) return metadata.error();
  if (!metadata->contains("uid")) {
    return Error{Errc::kInvalidArgument, file.string() + " is no checkpoint of this program", {}};
  }
  std::error_code code;
  const auto bytes = fs::file_size(file, code);
  return CheckpointSummary{file, code ? 0 : bytes, std::move(*metadata)};
}

Result<void> verify_checkpoint(const fs::path& file) {
  const auto snapshot = read_checkpoint(file);
  if (!snapshot) return snapshot.error();
  return {};
}

Result<void> export_checkpoint(const fs::path& file, const fs::path& to) {
  auto snapshot = read_checkpoint(file);
  if (!snapshot) return snapshot.error();
  std::error_code code;
  if (fs::exists(to, code)) return Error{Errc::kUnavailable, to.string() + " exists already", {}};
  SafetensorsContent content;
  content.metadata = {{"uid", to_string(snapshot->description.uid)},
                      {"architecture", snapshot->description.architecture},
                      {"updates", std::to_string(snapshot->updates)}};
  content.tensors = std::move(snapshot->parameters);
  for (auto& buffer : snapshot->buffers) content.tensors.push_back(std::move(buffer));
  return write_safetensors(fs::absolute(to, code), std::move(content));
}

}  // namespace dmoe::expert_server
