// A server that runs out of file descriptors, in a process of its own.
#include "tests/net/raw_peer.hpp"
#include "tests/net/rpc_fixture.hpp"
#include "tests/support/catch.hpp"

#include <poll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <string>

using namespace dmoe;
using namespace dmoe::test;

namespace {

constexpr rlim_t kDescriptors = 64;

/// Serves until its standard input end closes; writes its port to `port_out`, and what it logs to `log_out`. Never
/// returns.
[[noreturn]] void serve_with_few_descriptors(int port_out, int end_in, int log_out) {
  ::dup2(log_out, STDOUT_FILENO);
  ::dup2(log_out, STDERR_FILENO);
  ::close(log_out);
  const rlimit limit{kDescriptors, kDescriptors};
  ::setrlimit(RLIMIT_NOFILE, &limit);
  boost::asio::io_context io;
  net::RpcServer server(io, {}, echo);
  server.route("/healthz", [] { return net::HttpResponse{200, "text/plain", "ok\n"}; });
  if (server.listen().has_error()) ::_exit(1);
  const std::uint16_t port = server.port();
  if (::write(port_out, &port, sizeof(port)) != sizeof(port)) ::_exit(1);
  std::thread watch([end_in] {
    char byte = 0;
    (void)!::read(end_in, &byte, 1);
    ::_exit(0);
  });
  io.run();
  ::_exit(2);
}

/// Seconds of processor time that `pid` has used.
double processor_seconds(pid_t pid) {
  clockid_t clock{};
  timespec time{};
  if (::clock_getcpuclockid(pid, &clock) != 0 || ::clock_gettime(clock, &time) != 0) return -1;
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

/// Until its writers are gone.
std::string read_all(int fd) {
  std::string text;
  char piece[4'096];
  for (ssize_t got = 0; (got = ::read(fd, piece, sizeof(piece))) > 0;)
    text.append(piece, static_cast<std::size_t>(got));
  return text;
}

}  // namespace

TEST_CASE("a21 a server out of descriptors waits without spinning and accepts again", "[accept][a21][e1]") {
  int port_pipe[2];
  int end_pipe[2];
  REQUIRE(::pipe(port_pipe) == 0);
  REQUIRE(::pipe(end_pipe) == 0);
  int log_pipe[2];  // What is said in a second fits into it unread.
  REQUIRE(::pipe(log_pipe) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(end_pipe[1]);
    ::close(log_pipe[0]);
    serve_with_few_descriptors(port_pipe[1], end_pipe[0], log_pipe[1]);
  }
  REQUIRE(child > 0);
  ::close(log_pipe[1]);
  std::uint16_t port = 0;
  REQUIRE(::read(port_pipe[0], &port, sizeof(port)) == sizeof(port));
  {
    std::vector<std::unique_ptr<RawConnection>> crowd;
    for (int i = 0; i < 300; ++i) crowd.push_back(std::make_unique<RawConnection>(port));
    const double before = processor_seconds(child);
    pollfd nothing{port_pipe[0], POLLIN, 0};
    constexpr int kWatchMillis = 1'000;  // The time over which spinning would show: a whole core's worth.
    CHECK(::poll(&nothing, 1, kWatchMillis) == 0);
    CHECK(processor_seconds(child) - before < 0.2);
  }
  RawConnection after(port);
  after.send("GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
  CHECK(after.read_to_end().starts_with("HTTP/1.1 200 OK\r\n"));
  ::close(end_pipe[1]);
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  const std::string log = read_all(log_pipe[0]);
  INFO(log);
  CHECK(log.find("ulimit -n") != std::string::npos);
  CHECK(std::count(log.begin(), log.end(), '\n') <= 2);  // It was out of descriptors for over a second.
  for (const int fd : {port_pipe[0], port_pipe[1], end_pipe[0], log_pipe[0]}) ::close(fd);
}
