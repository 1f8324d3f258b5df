// Memory that frames take while they arrive and as long as somebody uses them.
#pragma once

#include "net/error.hpp"

#include <cstddef>
#include <functional>
#include <memory>

namespace dmoe::net {

/// Asked before a frame's memory is committed. Implemented by who owns the budget; thread-safe.
class FrameBudget {
 public:
  using Lease = std::shared_ptr<const void>;  ///< The bytes are free again when its last owner is gone. Never null.

  virtual ~FrameBudget() = default;

  /// kOverloaded: not now, the frame waits and is asked for again. Another error: never; its calls are answered with
  /// it.
  virtual Result<Lease> take(std::size_t bytes) = 0;
  /// Calls `retry` once, on any thread, when a `take` that failed before this call may succeed.
  virtual void when_freed(std::function<void()> retry) = 0;
};

}  // namespace dmoe::net
