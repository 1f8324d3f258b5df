// Writes checkpoints every so often.
#pragma once

#include "expert_server/expert_host.hpp"

#include <chrono>
#include <thread>

namespace dmoe::expert_server {

/// Owns the thread that writes, so that neither calls nor heartbeats wait for a disk.
class CheckpointTimer {
 public:
  /// `period` 0: never. `host` outlives this.
  CheckpointTimer(ExpertHost& host, std::chrono::milliseconds period);
  /// Ends the thread, after the write under way.
  void stop();

 private:
  std::jthread thread_;
};

}  // namespace dmoe::expert_server
