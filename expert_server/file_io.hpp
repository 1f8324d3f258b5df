// Files with errors as values: what the disk says reaches the log, and never ends the process.
#pragma once

#include "net/error.hpp"

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <utility>

namespace dmoe::expert_server {

/// An open file descriptor, closed on destruction. Not thread-safe.
class File {
 public:
  /// A new file with mode 0600; kUnavailable when it exists already or cannot be made.
  static Result<File> create_new(const std::filesystem::path& path);
  /// kNotFound: no such file.
  static Result<File> open_to_read(const std::filesystem::path& path);
  /// Made if missing; for locks.
  static Result<File> open_or_create(const std::filesystem::path& path);
  File(File&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)), path_(std::move(other.path_)) {}
  File& operator=(File&& other) noexcept;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File();

  Result<void> write(std::span<const std::uint8_t> bytes);
  Result<void> write_at(std::uint64_t offset, std::span<const std::uint8_t> bytes);
  /// Fills `bytes` whole; kInvalidArgument when the file ends before.
  Result<void> read(std::span<std::uint8_t> bytes);
  /// Asks the kernel to begin with what was written so far, so that `sync` finds little left to do. Best effort.
  void start_writing();
  Result<void> sync();
  Result<std::uint64_t> size();
  /// An exclusive advisory lock, held until the file is closed, released by the kernel when the process dies.
  /// kUnavailable: another process holds it, or the file system has no locks.
  Result<void> lock();

 private:
  File(int descriptor, std::filesystem::path path) : descriptor_(descriptor), path_(std::move(path)) {}
  static Result<File> open(const std::filesystem::path& path, int flags);
  Error failure(const char* action) const;

  int descriptor_ = -1;
  std::filesystem::path path_;
};

/// Makes a rename or a new file in `folder` survive a power cut.
Result<void> sync_folder(const std::filesystem::path& folder);

/// rename(2): `to` is replaced in one step.
Result<void> rename_file(const std::filesystem::path& from, const std::filesystem::path& to);

}  // namespace dmoe::expert_server
