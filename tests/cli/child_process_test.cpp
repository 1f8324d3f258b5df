// Children: started, watched, stopped and always reaped.
#include "cli/child_process.hpp"
#include "tests/e2e/program_run.hpp"
#include "tests/support/catch.hpp"

#include <csignal>

using namespace dmoe;
using cli::ChildOptions;
using cli::ChildProcess;
using dmoe::test::patience_ends;
using dmoe::test::test_directory;

namespace {

ChildOptions shell(const cli::TemporaryDirectory& directory, const std::string& script) {
  ChildOptions options;
  options.program = "/bin/sh";
  options.arguments = {"-c", script};
  options.log_file = directory.path() / "log";
  return options;
}

bool exists(pid_t pid) { return kill(pid, 0) == 0; }

}  // namespace

TEST_CASE("A child's exit status and output are seen", "[child]") {
  const auto directory = test_directory();
  auto child = ChildProcess::spawn(shell(directory, "echo out; echo err >&2; exit 7"));
  REQUIRE(child.has_value());
  const auto status = child->wait(patience_ends());
  REQUIRE(status.has_value());
  CHECK(status->code == 7);
  CHECK(status->signal == 0);
  CHECK(cli::describe(*status) == "exit status 7");
  CHECK(test::read_text(child->log_file()) == "out\nerr\n");
  CHECK(cli::tail_of(child->log_file(), 1) == "  err\n");
  CHECK_FALSE(child->running());
}

TEST_CASE("A child reports that it is ready with one line", "[child]") {
  const auto directory = test_directory();
  ChildOptions options = shell(directory, "echo ready >&3; exec 3>&-; exec sleep 1000");
  options.ready_pipe = true;
  auto child = ChildProcess::spawn(options);
  REQUIRE(child.has_value());
  const auto line = child->ready_line(patience_ends());
  REQUIRE(line.has_value());
  CHECK(*line == "ready");
  CHECK(child->running());
  CHECK(child->stop(patience_ends()).signal == SIGTERM);
}

TEST_CASE("A child that ends before it is ready is noticed at once", "[child]") {
  const auto directory = test_directory();
  ChildOptions options = shell(directory, "exit 3");
  options.ready_pipe = true;
  auto child = ChildProcess::spawn(options);
  REQUIRE(child.has_value());
  const auto line = child->ready_line(patience_ends());
  REQUIRE_FALSE(line.has_value());
  CHECK(line.error().code == Errc::kUnavailable);
}

TEST_CASE("Waiting for a silent child ends at the deadline or when told so", "[child]") {
  const auto directory = test_directory();
  ChildOptions options = shell(directory, "exec sleep 1000");
  options.ready_pipe = true;
  auto child = ChildProcess::spawn(options);
  REQUIRE(child.has_value());
  const auto late = child->ready_line(std::chrono::steady_clock::now() + std::chrono::milliseconds(20));
  REQUIRE_FALSE(late.has_value());
  CHECK(late.error().code == Errc::kDeadlineExceeded);
  std::array<int, 2> closed{};
  REQUIRE(pipe(closed.data()) == 0);
  close(closed[1]);  // Its other end is readable now: end of file.
  const auto told = child->ready_line(patience_ends(), closed[0]);
  close(closed[0]);
  REQUIRE_FALSE(told.has_value());
  CHECK(told.error().code == Errc::kCancelled);
}

TEST_CASE("A child that ignores SIGTERM is killed at the deadline", "[child]") {
  const auto directory = test_directory();
  ChildOptions options = shell(directory, "trap '' TERM; echo ready >&3; while :; do sleep 1000; done");
  options.ready_pipe = true;
  auto child = ChildProcess::spawn(options);
  REQUIRE(child.has_value());
  REQUIRE(child->ready_line(patience_ends()).has_value());
  CHECK(child->stop(std::chrono::steady_clock::now() + std::chrono::milliseconds(50)).signal == SIGKILL);
}

TEST_CASE("A child ends with its owner", "[child]") {
  const auto directory = test_directory();
  pid_t pid = -1;
  {
    auto child = ChildProcess::spawn(shell(directory, "exec sleep 1000"));
    REQUIRE(child.has_value());
    pid = child->pid();
    CHECK(exists(pid));
  }
  CHECK_FALSE(exists(pid));  // Reaped, too: a zombie would still exist.
}

TEST_CASE("A program that cannot be run is an error that names it", "[child]") {
  const auto directory = test_directory();
  ChildOptions options = shell(directory, "");
  options.program = directory.path() / "no-such-program";
  const auto child = ChildProcess::spawn(options);
  REQUIRE_FALSE(child.has_value());
  CHECK(child.error().message.find("no-such-program") != std::string::npos);
}

TEST_CASE("A child gets its environment and its file limit and no descriptor of ours", "[child]") {
  const auto directory = test_directory();
  const int ours = dup(0);
  REQUIRE(ours >= 0);
  ChildOptions options = shell(directory, "echo $DMOE_TEST_VALUE; ulimit -n; ls /proc/self/fd");
  options.environment = {"DMOE_TEST_VALUE=seen"};
  options.max_open_files = 256;
  auto child = ChildProcess::spawn(options);
  REQUIRE(child.has_value());
  REQUIRE(child->wait(patience_ends()).has_value());
  close(ours);
  CHECK(test::read_text(child->log_file()) == "seen\n256\n0\n1\n2\n3\n");  // 3: ls reading the directory.
}
