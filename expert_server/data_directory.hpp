// What a server keeps on disk, and the lock that makes one process its only user.
#pragma once

#include "expert_server/file_io.hpp"
#include "net/error.hpp"

#include <filesystem>

namespace dmoe::expert_server {

/// A data directory in use by this process until destruction. Nothing in it is touched before the lock is held.
class DataDirectory {
 public:
  /// Makes the folder when missing (mode 0700) and locks it. kUnavailable: another process uses it, or the disk
  /// refused; the message says which.
  static Result<DataDirectory> open(const std::filesystem::path& folder);

  const std::filesystem::path& path() const noexcept { return path_; }  ///< Absolute.
  std::filesystem::path identity_file() const { return path_ / "identity.pem"; }
  std::filesystem::path checkpoints() const { return path_ / "checkpoints"; }

 private:
  DataDirectory(std::filesystem::path path, File lock) : path_(std::move(path)), lock_(std::move(lock)) {}

  std::filesystem::path path_;
  File lock_;
};

}  // namespace dmoe::expert_server
