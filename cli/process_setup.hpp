// What every command wants of its process before the first thread starts.
#pragma once

#include <cstdint>

namespace dmoe::cli {

inline constexpr std::uint64_t kFewFiles =
    1'024;  ///< Below this many open files a server warns: it may refuse callers.

/// Raises the soft limit of open files to the hard limit. @return the limit now in force.
/// Many systems give 1,024 as the soft limit for the sake of old programs that use select(2); we do not.
std::uint64_t raise_file_limit() noexcept;

/// A peer that closes its socket must cost a failed write, not the process.
void ignore_broken_pipes() noexcept;

}  // namespace dmoe::cli
