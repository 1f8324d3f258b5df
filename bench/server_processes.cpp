#include "bench/server_processes.hpp"

#include "expert_server/server.hpp"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <csignal>
#include <cstdio>
#include <iostream>
#include <stdexcept>

namespace dmoe::bench {
namespace {

/// Serves until its parent closes the pipe or dies. Never returns.
[[noreturn]] void serve(const std::string& pattern, std::int64_t hidden_dim, std::uint16_t peer, int ready,
                        int compute_threads) {
  (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
  expert_server::ServerOptions options;
  options.listen = {"127.0.0.1", 0};
  if (peer != 0) options.initial_peers = {{"127.0.0.1", peer}};
  options.expert_pattern = pattern;
  options.expert.hidden_dim = hidden_dim;
  options.compute_threads = compute_threads;
  auto server = expert_server::Server::start(std::move(options));
  const std::uint16_t port = server ? (*server)->port() : 0;
  (void)!write(ready, &port, sizeof(port));
  if (server) {
    for (;;) pause();
  }
  _exit(1);
}

}  // namespace

ServerProcesses::ServerProcesses(const std::vector<std::string>& patterns, std::int64_t hidden_dim,
                                 int compute_threads) {
  for (const auto& pattern : patterns) {
    int ready[2];
    if (pipe(ready) != 0) throw std::runtime_error("cannot make a pipe");
    const std::uint16_t peer = servers_.empty() ? 0 : servers_.front().port;
    ServerProcess server;
    server.pid = fork();
    if (server.pid == 0) {
      close(ready[0]);
      serve(pattern, hidden_dim, peer, ready[1], compute_threads);
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
