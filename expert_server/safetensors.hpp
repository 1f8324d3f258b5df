// The safetensors file format: a JSON header and raw tensors. Public specification: github.com/huggingface/safetensors.
#pragma once

#include "expert_server/expert_module.hpp"
#include "net/error.hpp"

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace dmoe::expert_server {

/// Metadata key under which a file carries a digest over all of its bytes (see PieceDigest), taken with the digest's
/// own 64 digits replaced by zeros.
inline constexpr const char* kChecksumKey = "sha256_pieces";
/// The same as one plain SHA-256, as earlier versions wrote it; still read and checked.
inline constexpr const char* kPlainChecksumKey = "sha256";
inline constexpr std::uint64_t kMaxSafetensorsHeader = 16UL * 1024 * 1024;

struct SafetensorsContent {
  std::map<std::string, std::string> metadata;
  std::vector<NamedTensor> tensors;  ///< Contiguous CPU tensors, unique names.
};

/// Writes `content` with its checksum into a new temporary file beside `target`, fsyncs it, renames it over `target`,
/// and fsyncs the folder: `target` is at every moment the old file or the new one, complete.
/// kUnavailable: the disk refused (full, read-only, …), with its reason; `target` is as before, the temporary is gone.
Result<void> write_safetensors(const std::filesystem::path& target, SafetensorsContent content);

/// Reads and checks a file: sizes before anything is allocated, header, offsets without gaps, dtypes, checksum.
/// kNotFound: no such file; kInvalidArgument: damaged, naming what is wrong and where; kUnavailable: the disk refused.
/// A file without a checksum (written by other programs) is accepted only if `require_checksum` is false.
/// The tensors lie in the memory that the file was read into, where their alignment allows it: what is dropped gives
/// its pages back, what stays holds no other's.
Result<SafetensorsContent> read_safetensors(const std::filesystem::path& file, bool require_checksum = true);

/// The metadata alone, without reading tensors or verifying the checksum.
Result<std::map<std::string, std::string>> read_safetensors_metadata(const std::filesystem::path& file);

/// Whether a name is that of a temporary file of write_safetensors, left behind by a crash.
bool is_temporary_name(const std::string& file_name);

}  // namespace dmoe::expert_server
