// What a started node prints, so that a second machine can join without guessing.
#pragma once

#include "cli/ready_line.hpp"

#include <string>

namespace dmoe::cli {

/// The lines for a person, each ending in a newline: key file, peer ID, addresses, experts, and the exact line that
/// makes another machine join. `join_command`: "dmoe serve --pattern 'ffn.[0:4].[0:4]'", what to run there.
std::string startup_report(const ReadyLine& line, const std::string& join_command);

/// `text` as one word of a POSIX shell.
std::string shell_word(const std::string& text);

}  // namespace dmoe::cli
