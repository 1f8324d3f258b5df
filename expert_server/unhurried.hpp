// Work that yields to the calls a server answers.
#pragma once

#include <functional>

namespace dmoe::expert_server {

/// Runs `work` on a thread of its own with a low priority (nice 10: about a tenth of a busy core, all of an idle one)
/// and returns when it has ended. What it throws is thrown here.
void run_unhurried(const std::function<void()>& work);

}  // namespace dmoe::expert_server
