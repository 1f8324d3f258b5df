// How many updates an expert made between a caller's forward and backward pass.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace dmoe::expert_server {

/// Knows a caller's forward pass by its seed, which its backward pass repeats. Remembers the latest ones only. Not
/// thread-safe.
class Staleness {
 public:
  void forward(std::uint64_t seed, std::uint64_t updates) {
    if (seed == 0) return;  // The default: tells nobody apart.
    if (passes_.size() < kRemembered) {
      passes_.push_back({seed, updates});
      return;
    }
    passes_[next_] = {seed, updates};
    next_ = (next_ + 1) % kRemembered;
  }

  /// Updates since the forward pass of that seed; nothing when it is not known (any more).
  std::optional<std::uint64_t> backward(std::uint64_t seed, std::uint64_t updates) const {
    if (seed == 0) return std::nullopt;
    for (const auto& pass : passes_) {
      if (pass.seed == seed && pass.updates <= updates) return updates - pass.updates;
    }
    return std::nullopt;
  }

 private:
  static constexpr std::size_t kRemembered = 256;
  struct Pass {
    std::uint64_t seed;
    std::uint64_t updates;
  };
  std::vector<Pass> passes_;
  std::size_t next_ = 0;
};

}  // namespace dmoe::expert_server
