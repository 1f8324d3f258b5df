#include "cli/temporary_directory.hpp"

#include <stdlib.h>  // mkdtemp

#include <cerrno>
#include <system_error>
#include <utility>

namespace dmoe::cli {

Result<TemporaryDirectory> TemporaryDirectory::make(const std::string& name) {
  std::error_code error;
  const std::filesystem::path parent = std::filesystem::temp_directory_path(error);
  if (error) return Error{Errc::kUnavailable, "no temporary directory (set TMPDIR): " + error.message(), {}};
  std::string path = (parent / (name + "-XXXXXX")).string();
  if (mkdtemp(path.data()) == nullptr) {
    return Error{Errc::kUnavailable,
                 "cannot make a directory in " + parent.string() +
                     " (set TMPDIR to one that is writable): " + std::generic_category().message(errno),
                 {}};
  }
  return TemporaryDirectory(path);
}

TemporaryDirectory::TemporaryDirectory(TemporaryDirectory&& other) noexcept
    : path_(std::exchange(other.path_, {})), kept_(other.kept_) {}

TemporaryDirectory::~TemporaryDirectory() {
  if (kept_ || path_.empty()) return;
  std::error_code ignored;  // What cannot be removed is left to the system's own cleaning of that directory.
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace dmoe::cli
