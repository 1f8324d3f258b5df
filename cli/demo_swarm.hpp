// The processes that `dmoe demo` starts: a DHT node and expert servers on this machine.
#pragma once

#include "cli/child_process.hpp"
#include "cli/ready_line.hpp"
#include "cli/stop_signals.hpp"
#include "cli/temporary_directory.hpp"

#include "net/error.hpp"

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace dmoe::cli {

struct SwarmOptions {
  std::filesystem::path program;  ///< The `dmoe` program.
  std::int64_t servers = 4;
  std::int64_t experts_per_server = 4;
  std::int64_t hidden_dim = 128;
  double learning_rate = 0.001;  ///< Of the experts' optimizers.
  std::uint64_t seed = 0;
  std::chrono::milliseconds start_timeout{60'000};  ///< For all processes together.
};

/// Server i hosts `ffn.i.0` to `ffn.i.<experts_per_server - 1>`. All processes end with this object. Start it from a
/// thread that outlives it (see ChildProcess).
class DemoSwarm {
 public:
  /// Starts all processes and returns once every expert is announced. On failure the message names the process; its
  /// log's last lines follow after a newline. kCancelled: a stop signal came.
  static Result<DemoSwarm> start(const SwarmOptions& options, StopSignals& signals);

  const std::vector<net::Endpoint>& initial_peers() const noexcept { return initial_peers_; }
  const std::filesystem::path& directory() const noexcept { return directory_.path(); }
  void keep_directory() noexcept { directory_.keep(); }

  /// SIGKILL; returns when the process is gone.
  void kill_server(std::size_t index);
  /// The index of a server that ended without being asked to, and its log's tail.
  std::optional<std::string> unexpected_end();
  /// Asks all that still run to end, then makes them.
  void stop();

 private:
  struct Process {
    std::string name;
    ChildProcess child;
    bool killed = false;  // By us.
  };
  explicit DemoSwarm(TemporaryDirectory directory) : directory_(std::move(directory)) {}
  Result<void> spawn(const SwarmOptions& options, const std::string& name, std::vector<std::string> arguments);
  Result<ReadyLine> wait_ready(Process& process, ChildProcess::Deadline deadline, StopSignals& signals);

  TemporaryDirectory directory_;
  std::vector<net::Endpoint> initial_peers_;
  std::vector<Process> processes_;  // The DHT node, then the servers.
};

}  // namespace dmoe::cli
