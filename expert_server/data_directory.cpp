#include "expert_server/data_directory.hpp"

#include <system_error>

namespace dmoe::expert_server {

namespace fs = std::filesystem;

Result<DataDirectory> DataDirectory::open(const fs::path& folder) {
  std::error_code code;
  auto path = fs::absolute(folder, code);
  const bool existed = !code && fs::exists(path, code);
  if (!code) fs::create_directories(path, code);
  if (!code && !existed) fs::permissions(path, fs::perms::owner_all, code);
  if (code) {
    return Error{Errc::kUnavailable, "cannot use the data directory " + folder.string() + ": " + code.message(), {}};
  }
  auto lock = File::open_or_create(path / "lock");
  if (!lock) return Error{Errc::kUnavailable, lock.error().message, {}};
  if (auto locked = lock->lock(); !locked) {
    const bool in_use = locked.error().code == Errc::kUnavailable;
    return Error{Errc::kUnavailable,
                 "data directory " + path.string() +
                     (in_use ? " is in use by another process: stop that one, or choose another directory ("
                             : " is on a file system that cannot lock files: choose a directory on a local disk (") +
                     locked.error().message + ")",
                 {}};
  }
  return DataDirectory(std::move(path), std::move(*lock));
}

}  // namespace dmoe::expert_server
