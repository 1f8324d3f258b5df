// Where a server keeps its key, records and checkpoints when nobody says.
#pragma once

#include "net/error.hpp"

#include <filesystem>
#include <string>

namespace dmoe::cli {

/// `given` as an absolute path; when empty, $XDG_DATA_HOME/dmoe/<purpose> or ~/.local/share/dmoe/<purpose>.
/// kInvalidArgument: no home directory either; the message names --data-dir.
Result<std::filesystem::path> data_directory(const std::string& given, const std::string& purpose);

}  // namespace dmoe::cli
