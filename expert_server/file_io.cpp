#include "expert_server/file_io.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <system_error>
#include <utility>

namespace dmoe::expert_server {
namespace {

constexpr std::size_t kLargestTransfer = 64UL * 1024 * 1024;  ///< Linux moves at most 2 GiB a call; smaller is as fast.

Error system_failure(const char* action, const std::filesystem::path& path, int code) {
  return {code == ENOENT ? Errc::kNotFound : Errc::kUnavailable,
          std::string("cannot ") + action + " " + path.string() + ": " + std::generic_category().message(code),
          {}};
}

}  // namespace

Error File::failure(const char* action) const { return system_failure(action, path_, errno); }

Result<File> File::open(const std::filesystem::path& path, int flags) {
  const int descriptor = ::open(path.c_str(), flags | O_CLOEXEC, S_IRUSR | S_IWUSR);
  if (descriptor < 0) return system_failure("open", path, errno);
  return File(descriptor, path);
}

Result<File> File::create_new(const std::filesystem::path& path) { return open(path, O_WRONLY | O_CREAT | O_EXCL); }
Result<File> File::open_to_read(const std::filesystem::path& path) { return open(path, O_RDONLY); }
Result<File> File::open_or_create(const std::filesystem::path& path) { return open(path, O_RDWR | O_CREAT); }

File& File::operator=(File&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(path_, other.path_);
  return *this;
}

File::~File() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void File::bypass_cache() {
  const int flags = ::fcntl(descriptor_, F_GETFL);
  if (flags >= 0) (void)::fcntl(descriptor_, F_SETFL, flags | O_DIRECT);
}

/// Some file systems promise direct transfers and then refuse one. False: it was not that.
bool File::leave_direct() {
  const int flags = ::fcntl(descriptor_, F_GETFL);
  return flags >= 0 && (flags & O_DIRECT) != 0 && ::fcntl(descriptor_, F_SETFL, flags & ~O_DIRECT) == 0;
}

Result<void> File::write_at(std::uint64_t offset, std::span<const std::uint8_t> bytes) {
  while (!bytes.empty()) {
    const auto written = ::pwrite(descriptor_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0 && errno == EINVAL && leave_direct()) continue;
    if (written <= 0) return failure("write");
    bytes = bytes.subspan(static_cast<std::size_t>(written));
    offset += static_cast<std::uint64_t>(written);
  }
  return {};
}

Result<void> File::read(std::span<std::uint8_t> bytes) {
  while (!bytes.empty()) {
    const auto got = ::read(descriptor_, bytes.data(), std::min(bytes.size(), kLargestTransfer));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return failure("read");
    if (got == 0) return ends_early();
    bytes = bytes.subspan(static_cast<std::size_t>(got));
  }
  return {};
}

Result<std::size_t> File::read_at(std::uint64_t offset, std::span<std::uint8_t> bytes) {
  std::size_t got = 0;
  bool again = true;  // Another thread may have left direct transfers while this one's was refused.
  while (got < bytes.size()) {
    const auto now = ::pread(descriptor_, bytes.data() + got, bytes.size() - got, static_cast<off_t>(offset + got));
    if (now < 0 && errno == EINTR) continue;
    if (now < 0 && errno == EINVAL && (leave_direct() || std::exchange(again, false))) continue;
    if (now < 0) return failure("read");
    if (now == 0) break;
    got += static_cast<std::size_t>(now);
  }
  return got;
}

Error File::ends_early() const { return {Errc::kInvalidArgument, path_.string() + " ends too early", {}}; }

Result<void> File::resize(std::uint64_t size) {
  if (::ftruncate(descriptor_, static_cast<off_t>(size)) != 0) return failure("write");
  return {};
}

Result<void> File::sync() {
  if (::fsync(descriptor_) != 0) return failure("fsync");
  return {};
}

Result<std::uint64_t> File::size() {
  struct stat info {};
  if (::fstat(descriptor_, &info) != 0) return failure("stat");
  if (!S_ISREG(info.st_mode)) return Error{Errc::kInvalidArgument, path_.string() + " is no regular file", {}};
  return static_cast<std::uint64_t>(info.st_size);
}

Result<void> File::lock() {
  if (::flock(descriptor_, LOCK_EX | LOCK_NB) == 0) return {};
  if (errno == EWOULDBLOCK) return failure("lock");
  auto error = failure("lock");  // A network file system without a lock service, for example.
  error.code = Errc::kInternal;
  return error;
}

Result<void> sync_folder(const std::filesystem::path& folder) {
  auto file = File::open_to_read(folder);
  if (!file) return file.error();
  return file->sync();
}

Result<void> rename_file(const std::filesystem::path& from, const std::filesystem::path& to) {
  if (std::rename(from.c_str(), to.c_str()) != 0) return system_failure("rename", from, errno);
  return {};
}

}  // namespace dmoe::expert_server
