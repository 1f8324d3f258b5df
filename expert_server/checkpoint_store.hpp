// The checkpoints of a server's experts: `<folder>/<uid>/checkpoint-0000000012.safetensors`, the newest few of each.
#pragma once

#include "expert_server/expert_backend.hpp"
#include "net/error.hpp"

#include <cstddef>
#include <filesystem>
#include <optional>
#include <vector>

namespace dmoe::expert_server {

/// Used by one thread at a time, by one process (see DataDirectory). Each expert's folder is whole by itself: it may be
/// copied to another server.
class CheckpointStore {
 public:
  /// `keep`: files kept per expert, at least 1.
  explicit CheckpointStore(std::filesystem::path folder, std::size_t keep);

  /// Experts with at least one checkpoint file, ascending.
  std::vector<ExpertUid> stored() const;

  /// Writes a new file (see write_safetensors), then deletes all but the newest `keep`.
  /// kUnavailable: the disk refused; earlier files are untouched.
  Result<void> save(const ExpertSnapshot& snapshot);

  /// The newest intact checkpoint; nothing when the expert has none. A damaged one is logged and passed over, never
  /// deleted. Without the optimizer's tensors it is logged and loaded: `optimizer_state` is empty then.
  /// kInvalidArgument: all are damaged, or one is of another expert; the message says what to do.
  Result<std::optional<ExpertSnapshot>> load(const ExpertUid& uid);

 private:
  std::filesystem::path folder_;
  std::size_t keep_;
};

/// Whether a file name is one that CheckpointStore gives.
bool is_checkpoint_name(const std::string& file_name);

/// One file as a snapshot. kInvalidArgument: damaged, or no checkpoint of this program.
Result<ExpertSnapshot> read_checkpoint(const std::filesystem::path& file);

}  // namespace dmoe::expert_server
