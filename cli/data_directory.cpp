#include "cli/data_directory.hpp"

#include <cstdlib>
#include <system_error>

namespace dmoe::cli {
namespace {

std::filesystem::path from_environment(const char* name) {
  const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): nobody here sets the environment.
  return value == nullptr ? std::filesystem::path{} : std::filesystem::path(value);
}

}  // namespace

Result<std::filesystem::path> data_directory(const std::string& given, const std::string& purpose) {
  std::filesystem::path path(given);
  if (path.empty()) {
    const std::filesystem::path data = from_environment("XDG_DATA_HOME");
    const std::filesystem::path home = from_environment("HOME");
    if (data.is_absolute()) {
      path = data / "dmoe" / purpose;
    } else if (home.is_absolute()) {
      path = home / ".local" / "share" / "dmoe" / purpose;
    } else {
      return Error{Errc::kInvalidArgument, "--data-dir: there is no home directory to keep data in; name one", {}};
    }
  }
  std::error_code error;
  path = std::filesystem::absolute(path, error);
  if (error) return Error{Errc::kInvalidArgument, "--data-dir '" + given + "': " + error.message(), {}};
  return path;
}

}  // namespace dmoe::cli
