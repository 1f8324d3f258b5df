// The checkpoints of a server's experts: `<folder>/<uid>/checkpoint-0000000012.safetensors`, the newest few of each.
#pragma once

#include "expert_server/expert_backend.hpp"
#include "net/error.hpp"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

namespace dmoe::expert_server {

/// Used by one thread at a time, by one process (see DataDirectory). Each expert's folder is whole by itself: it may be
/// copied to another server.
class CheckpointStore {
 public:
  /// `keep`: files kept per expert, at least 1. `max_bytes`: of all files together, one that is being written included;
  /// 0: no limit.
  explicit CheckpointStore(std::filesystem::path folder, std::size_t keep, std::uint64_t max_bytes = 0);

  /// Experts with at least one checkpoint file, ascending.
  std::vector<ExpertUid> stored() const;

  /// Deletes the oldest files, of whatever expert, where the new one would exceed `max_bytes`, but never an expert's
  /// newest. Writes the new one (see write_safetensors), then deletes all of its expert's but the newest `keep`.
  /// kUnavailable: the disk refused, or `max_bytes` leaves no room; the newest file is untouched.
  Result<void> save(const ExpertSnapshot& snapshot);

  /// The newest intact checkpoint; nothing when the expert has none. A damaged one is logged and passed over, never
  /// deleted. Without the optimizer's tensors it is logged and loaded: `optimizer_state` is empty then.
  /// kInvalidArgument: all are damaged, or one is of another expert; the message says what to do.
  Result<std::optional<ExpertSnapshot>> load(const ExpertUid& uid);

 private:
  std::filesystem::path folder_;
  Result<void> make_room(std::uint64_t bytes) const;

  std::size_t keep_;
  std::uint64_t max_bytes_;
};

/// Whether a file name is one that CheckpointStore gives.
bool is_checkpoint_name(const std::string& file_name);

/// One file as a snapshot. kInvalidArgument: damaged, or no checkpoint of this program.
Result<ExpertSnapshot> read_checkpoint(const std::filesystem::path& file);

}  // namespace dmoe::expert_server
