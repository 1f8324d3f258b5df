// What is said of somebody's mistake. Private to expert_server/.
#pragma once

#include "net/error.hpp"

#include <string>
#include <utility>

namespace dmoe::expert_server {

inline Error invalid(std::string message) { return {Errc::kInvalidArgument, std::move(message), {}}; }

}  // namespace dmoe::expert_server
