// What a started node prints, so that a second machine can join without guessing.
#pragma once

#include "cli/ready_line.hpp"

#include <string>
#include <string_view>

namespace dmoe::cli {

/// The lines for a person, each ending in a newline: key file, peer ID, addresses, experts, and the exact line that
/// makes another machine join. `join_command`: "dmoe serve --pattern 'ffn.[0:4].[0:4]'", what to run there.
std::string startup_report(const ReadyLine& line, const std::string& join_command);

/// `text` as one word of a POSIX shell.
std::string shell_word(const std::string& text);

/// The UID pattern of as many experts beside those of `pattern`, in its first dimension: "ffn.[2:4].[0:4]" for
/// "ffn.[0:2].[0:4]". An expert is hosted by one server, so that a second one cannot have the same pattern.
std::string pattern_beside(std::string_view pattern);

}  // namespace dmoe::cli
