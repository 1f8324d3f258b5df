#include "net/identity_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <system_error>
#include <utility>

namespace dmoe::net {
namespace {

constexpr std::size_t kMaxSecretBytes = 64UL * 1024;

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;

  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }

 private:
  int fd_;
};

Error refused(const char* action, const std::filesystem::path& file, int code) {
  return {Errc::kUnavailable,
          std::string("cannot ") + action + " '" + file.string() + "': " + std::generic_category().message(code),
          {}};
}

Result<void> check_is_private(const struct stat& status, const std::filesystem::path& file) {
  if (!S_ISREG(status.st_mode) || std::cmp_greater(status.st_size, kMaxSecretBytes)) {
    return Error{Errc::kInvalidArgument, "'" + file.string() + "' is not a key file", {}};
  }
  if ((status.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    return Error{Errc::kInvalidArgument,
                 "'" + file.string() + "' can be read or written by others than its owner; run chmod 600 on it",
                 {}};
  }
  return {};
}

Result<std::string> read_all(int fd, const std::filesystem::path& file) {
  std::string content(kMaxSecretBytes + 1, '\0');
  std::size_t size = 0;
  while (size < content.size()) {
    const ssize_t got = ::read(fd, content.data() + size, content.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return refused("read", file, errno);
    if (got == 0) break;
    size += static_cast<std::size_t>(got);
  }
  content.resize(size);
  return content;
}

/// @return 0 or errno.
int write_and_sync(int fd, const std::string& content) {
  for (std::size_t done = 0; done < content.size();) {
    const ssize_t put = ::write(fd, content.data() + done, content.size() - done);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return errno;
    done += static_cast<std::size_t>(put);
  }
  return ::fsync(fd) == 0 ? 0 : errno;
}

/// Gives `temporary` the name `file` unless that name is taken. @return 0 or errno.
int publish(const std::string& temporary, const std::string& file) {
  if (::renameat2(AT_FDCWD, temporary.c_str(), AT_FDCWD, file.c_str(), RENAME_NOREPLACE) == 0) return 0;
  // Not every file system knows RENAME_NOREPLACE (NFS); link(2) gives the same promise there.
  const int failure = errno != EINVAL ? errno : ::link(temporary.c_str(), file.c_str()) == 0 ? 0 : errno;
  ::unlink(temporary.c_str());
  return failure;
}

void sync_folder(const std::filesystem::path& folder) {
  const FileDescriptor fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (fd) ::fsync(fd.get());  // Best effort: the name is already visible to every process.
}

Result<void> make_folder(const std::filesystem::path& folder) {
  std::error_code failure;
  if (folder.empty() || std::filesystem::exists(folder, failure)) return {};
  std::filesystem::create_directories(folder, failure);
  if (failure) return refused("make the folder", folder, failure.value());
  std::filesystem::permissions(folder, std::filesystem::perms::owner_all, failure);
  return {};
}

}  // namespace

Result<std::string> read_secret_file(const std::filesystem::path& file) {
  const FileDescriptor fd(::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // A FIFO must not block us.
  if (!fd && errno == ENOENT) return Error{Errc::kNotFound, "there is no file '" + file.string() + "'", {}};
  if (!fd) return refused("open", file, errno);
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) return refused("look at", file, errno);
  const auto checked = check_is_private(status, file);
  if (checked.has_error()) return checked.error();
  return read_all(fd.get(), file);
}

Result<void> write_new_secret_file(const std::filesystem::path& file, const std::string& content) {
  const auto made = make_folder(file.parent_path());
  if (made.has_error()) return made.error();
  std::string temporary = file.string() + ".XXXXXX";
  const FileDescriptor fd(::mkostemp(temporary.data(), O_CLOEXEC));  // Mode 0600 by definition.
  if (!fd) return refused("create a file beside", file, errno);
  if (const int failure = write_and_sync(fd.get(), content); failure != 0) {
    ::unlink(temporary.c_str());
    return refused("write", file, failure);
  }
  const int failure = publish(temporary, file.string());
  if (failure == EEXIST) {
    return Error{Errc::kInvalidArgument, "'" + file.string() + "' exists and is not replaced", {}};
  }
  if (failure != 0) return refused("create", file, failure);
  sync_folder(file.has_parent_path() ? file.parent_path() : ".");
  return {};
}

}  // namespace dmoe::net
