// What to do about an error of a layer below, in the words of the command line.
#pragma once

#include "net/error.hpp"

#include <string>

namespace dmoe::cli {

/// The error's sentence with names of settings written as flags ("num_experts" becomes "--num-experts") and, where the
/// layer below can only say what failed, followed by what a person may do.
std::string advise(const Error& error);

}  // namespace dmoe::cli
