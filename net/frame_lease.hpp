// A frame that waits for memory.
#pragma once

#include "net/frame_budget.hpp"
#include "net/shared_socket.hpp"

#include <chrono>
#include <functional>
#include <memory>

namespace dmoe::net {

/// Asks `budget` for `bytes`, again whenever some are freed, for at most `patience`. `done` is called once on the
/// strand, perhaps within this function, with the lease or the budget's last answer. To be called on the strand.
void take_lease(const Strand& strand, std::shared_ptr<FrameBudget> budget, std::size_t bytes,
                std::chrono::milliseconds patience, std::function<void(Result<FrameBudget::Lease>)> done);

}  // namespace dmoe::net
