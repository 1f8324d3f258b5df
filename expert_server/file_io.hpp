// Files with errors as values: what the disk says reaches the log, and never ends the process.
#pragma once

#include "net/error.hpp"

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <utility>

namespace dmoe::expert_server {

/// What a transfer past the page cache must begin at and be a multiple of, in memory and in the file.
inline constexpr std::size_t kDirectAlignment = 4'096;

/// An open file descriptor, closed on destruction. Not thread-safe, except that reads and writes at given places may
/// run at once.
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

  /// From now on transfers go between the disk and the caller's memory, past the page cache, if the file system can do
  /// that; then all of them must keep to kDirectAlignment. A checkpoint is several times as fast so, and calls that are
  /// served meanwhile keep their cache.
  void bypass_cache();

  Result<void> write_at(std::uint64_t offset, std::span<const std::uint8_t> bytes);
  /// Fills `bytes` whole; kInvalidArgument when the file ends before.
  Result<void> read(std::span<std::uint8_t> bytes);
  /// As many bytes as there are from `offset` on, at most bytes.size().
  Result<std::size_t> read_at(std::uint64_t offset, std::span<std::uint8_t> bytes);
  Error ends_early() const;
  Result<void> resize(std::uint64_t size);
  Result<void> sync();
  Result<std::uint64_t> size();
  /// An exclusive advisory lock, held until the file is closed, released by the kernel when the process dies.
  /// kUnavailable: another process holds it, or the file system has no locks.
  Result<void> lock();

 private:
  File(int descriptor, std::filesystem::path path) : descriptor_(descriptor), path_(std::move(path)) {}
  static Result<File> open(const std::filesystem::path& path, int flags);
  Error failure(const char* action) const;

  bool leave_direct();

  int descriptor_ = -1;
  std::filesystem::path path_;
};

/// Makes a rename or a new file in `folder` survive a power cut.
Result<void> sync_folder(const std::filesystem::path& folder);

/// rename(2): `to` is replaced in one step.
Result<void> rename_file(const std::filesystem::path& from, const std::filesystem::path& to);

}  // namespace dmoe::expert_server
