// The options of `dmoe serve` and how they become a server's.
#pragma once

#include "cli/network_options.hpp"

#include "expert_server/server.hpp"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace dmoe::cli {

/// As the command line gives them: durations in seconds, sizes in MiB.
struct ServeOptions {
  std::string pattern = "ffn.[0:4].[0:4]";
  std::size_t num_experts = 0;
  expert_server::ExpertOptions expert;
  std::vector<std::string> expert_arguments;
  std::string expert_script;

  NetworkOptions network;

  double checkpoint_period = 300;
  std::size_t keep_checkpoints = 3;
  std::uint64_t max_disk = 0;
  bool reset_optimizer = false;

  std::vector<std::string> devices{"cpu"};
  int threads = 0;
  int io_threads = 1;
  std::uint64_t seed = 0;
  std::size_t queue_batches = 4;
  std::size_t queue_tasks = 1'024;
  double batch_timeout = 0;
  double heartbeat = 15;
  double announcement_ttl = 60;
  double shutdown_grace = 5;
  std::uint64_t max_memory = 0;
  std::size_t max_resident_experts = 0;
  std::size_t max_message = 256;
  std::size_t max_connections = 4'096;
  std::string trace_file;
  std::uint64_t max_trace_size = 64;
};

void add_serve_options(CLI::App& command, ServeOptions& options);

/// kInvalidArgument: options that do not go together; the message names the flag and the fix.
Result<expert_server::ServerOptions> to_server_options(const ServeOptions& options);

}  // namespace dmoe::cli
