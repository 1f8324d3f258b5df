#include "bench/server_processes.hpp"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <csignal>
#include <cstdio>
#include <iostream>
#include <stdexcept>
#include <utility>

namespace dmoe::bench {
namespace {

/// Serves until its parent closes the pipe or dies. Never returns.
[[noreturn]] void serve(expert_server::ServerOptions options, std::uint16_t peer, int ready) {
  (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
  options.listen = {"127.0.0.1", 0};
  if (peer != 0) options.initial_peers = {{"127.0.0.1", peer}};
  auto server = expert_server::Server::start(std::move(options));
  const std::uint16_t port = server ? (*server)->port() : 0;
  (void)!write(ready, &port, sizeof(port));
  if (server) {
    for (;;) pause();
  }
  _exit(1);
}

}  // namespace

ServerProcesses::ServerProcesses(std::vector<expert_server::ServerOptions> servers) {
  for (auto& options : servers) {
    const auto pattern = options.expert_pattern;
    int ready[2];
    if (pipe(ready) != 0) throw std::runtime_error("cannot make a pipe");
    const std::uint16_t peer = servers_.empty() ? 0 : servers_.front().port;
    ServerProcess server;
    server.pid = fork();
    if (server.pid == 0) {
      close(ready[0]);
      serve(std::move(options), peer, ready[1]);
    }
    close(ready[1]);
    const bool up = server.pid > 0 && read(ready[0], &server.port, sizeof(server.port)) == sizeof(server.port);
    close(ready[0]);
    if (server.pid > 0) servers_.push_back(server);
    if (!up || server.port == 0) throw std::runtime_error("an expert server for " + pattern + " did not come up");
  }
}

ServerProcesses::~ServerProcesses() {
  for (const auto& server : servers_) {
    (void)kill(server.pid, SIGKILL);
    (void)waitpid(server.pid, nullptr, 0);
  }
}

std::vector<std::uint16_t> ServerProcesses::ports() const {
  std::vector<std::uint16_t> ports;
  for (const auto& server : servers_) ports.push_back(server.port);
  return ports;
}

std::vector<expert_server::ServerOptions> ffn_servers(const std::vector<std::string>& patterns, std::int64_t hidden_dim,
                                                      int compute_threads) {
  std::vector<expert_server::ServerOptions> servers;
  for (const auto& pattern : patterns) {
    auto& options = servers.emplace_back();
    options.expert_pattern = pattern;
    options.expert.hidden_dim = hidden_dim;
    options.compute_threads = compute_threads;
  }
  return servers;
}

void run_each_in_a_process(std::size_t count, const std::function<void(std::size_t)>& part) {
  std::fflush(nullptr);
  for (std::size_t i = 0; i < count; ++i) {
    const pid_t pid = fork();
    if (pid == 0) {
      (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
      int code = 0;
      try {
        part(i);
      } catch (const std::exception& error) {
        std::cerr << "dmoe-bench: " << error.what() << '\n';
        code = 1;
      }
      std::cout << std::flush;
      std::fflush(nullptr);
      _exit(code);
    }
    int status = 0;
    if (pid < 0 || waitpid(pid, &status, 0) != pid || status != 0) {
      throw std::runtime_error("part " + std::to_string(i) + " of the suite failed");
    }
  }
}

}  // namespace dmoe::bench
