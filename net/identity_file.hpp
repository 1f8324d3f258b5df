// Small secret files: owner-only, never half written, never replaced.
#pragma once

#include "net/error.hpp"

#include <filesystem>
#include <string>

namespace dmoe::net {

/// The file's bytes, at most 64 KiB. kNotFound: no such file; kInvalidArgument: not a regular file, too large, or
/// readable by others than its owner; kUnavailable: the operating system refused.
Result<std::string> read_secret_file(const std::filesystem::path& file);

/// Writes a new file with mode 0600 (temporary file beside it, fsync, rename); makes missing parent folders (0700).
/// kInvalidArgument: the file exists; kUnavailable: the disk or a permission refused, with the reason.
Result<void> write_new_secret_file(const std::filesystem::path& file, const std::string& content);

}  // namespace dmoe::net
