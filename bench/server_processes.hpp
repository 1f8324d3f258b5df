// Expert servers in processes of their own, made by forking this one.
#pragma once

#include "expert_server/server.hpp"

#include <sys/types.h>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace dmoe::bench {

struct ServerProcess {
  pid_t pid = 0;
  std::uint16_t port = 0;
};

/// One process per server; each joins the first. Must be made before this process has started a thread or used torch: a
/// forked child has only the thread that forked. Ends them when destroyed.
class ServerProcesses {
 public:
  /// They listen on ports of the system's choice; all else is as `servers` say. Throws std::runtime_error when one does
  /// not come up.
  explicit ServerProcesses(std::vector<expert_server::ServerOptions> servers);
  ~ServerProcesses();
  ServerProcesses(const ServerProcesses&) = delete;
  ServerProcesses& operator=(const ServerProcesses&) = delete;

  std::uint16_t first_port() const { return servers_.front().port; }
  std::vector<std::uint16_t> ports() const;
  const std::vector<ServerProcess>& all() const noexcept { return servers_; }

 private:
  std::vector<ServerProcess> servers_;
};

/// Servers for `ServerProcesses`, one per pattern, with `ffn` experts.
std::vector<expert_server::ServerOptions> ffn_servers(const std::vector<std::string>& patterns, std::int64_t hidden_dim,
                                                      int compute_threads);

/// Runs `part(0)` to `part(count - 1)`, each in a forked child that starts without threads, one after the other. Throws
/// std::runtime_error when one fails.
void run_each_in_a_process(std::size_t count, const std::function<void(std::size_t)>& part);

}  // namespace dmoe::bench
