// `dmoe demo` as a whole, short.
#include "tests/e2e/program_run.hpp"
#include "tests/support/catch.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <sstream>
#include <vector>

using namespace dmoe;
using dmoe::test::eventually;
using dmoe::test::patience_ends;
using dmoe::test::test_directory;

namespace {

/// Processes whose parent is `pid`.
std::vector<pid_t> children_of(pid_t pid) {
  std::vector<pid_t> children;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/task")) {
    std::istringstream list(test::read_text(entry.path() / "children"));
    for (pid_t child = 0; list >> child;) children.push_back(child);
  }
  return children;
}

/// A zombie does not count: it only waits for its new parent to look.
bool alive(pid_t pid) {
  const std::string status = test::read_text("/proc/" + std::to_string(pid) + "/stat");
  const std::size_t name_end = status.rfind(')');
  return name_end != std::string::npos && status[name_end + 2] != 'Z';
}

bool none_alive(const std::vector<pid_t>& pids) { return std::none_of(pids.begin(), pids.end(), alive); }

/// A demo that would run for hours, in its own temporary directory; returns once it trains.
cli::ChildProcess start_long_demo(const std::filesystem::path& directory) {
  cli::ChildOptions options;
  options.program = test::program_under_test();
  options.arguments = {"demo", "--steps", "1000000", "--hidden-dim", "16", "--batch-size", "32"};
  options.log_file = directory / "log";
  options.environment = {"TMPDIR=" + directory.string()};
  auto demo = cli::ChildProcess::spawn(options);
  REQUIRE(demo.has_value());
  REQUIRE(eventually([&] { return test::read_text(options.log_file).find("loss") != std::string::npos; }));
  return *std::move(demo);
}

std::size_t directories_in(const std::filesystem::path& directory) {
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) count += entry.is_directory() ? 1 : 0;
  return count;
}

}  // namespace

TEST_CASE("The demo trains over four servers and survives the loss of one", "[e2e]") {
  const test::Finished run = test::run_dmoe({"demo", "--steps", "60", "--seed", "1", "--json"});
  INFO(run.out << run.err);
  REQUIRE(run.status.code == 0);
  const auto json = nlohmann::json::parse(run.out.substr(run.out.rfind('\n', run.out.size() - 2) + 1));
  CHECK(json.at("test_accuracy").get<double>() > 0.6);
  CHECK(json.at("steps") == 60);
  CHECK(json.at("seconds").get<double>() > 0);
  CHECK(json.at("experts_start") == 16);
  CHECK(json.at("experts_end") == 12);
  CHECK(json.at("servers_killed") == 1);
  CHECK(json.at("failed_calls").get<int>() >= 1);
  CHECK(json.at("max_step_ms_after_kill").get<double>() > 0);
  CHECK(run.out.find("killed server 3") != std::string::npos);
  CHECK(run.out.find("test accuracy") != std::string::npos);
}

TEST_CASE("An interrupted demo takes its processes and files with it", "[e2e]") {
  const auto directory = test_directory();
  cli::ChildProcess demo = start_long_demo(directory.path());
  const auto children = children_of(demo.pid());
  CHECK(children.size() == 5);
  demo.send(SIGINT);
  const auto status = demo.wait(patience_ends());
  REQUIRE(status.has_value());
  CHECK(status->code == 0);
  CHECK(none_alive(children));
  CHECK(directories_in(directory.path()) == 0);
}

TEST_CASE("The processes of a killed demo end with it", "[e2e]") {
  const auto directory = test_directory();
  cli::ChildProcess demo = start_long_demo(directory.path());
  const auto children = children_of(demo.pid());
  REQUIRE(children.size() == 5);
  demo.send(SIGKILL);
  REQUIRE(demo.wait(patience_ends()).has_value());
  CHECK(eventually([&] { return none_alive(children); }));
}

TEST_CASE("A demo whose servers cannot start shows the end of a log and what to do", "[e2e]") {
  // 64 descriptors as a hard limit are too few for a DHT node's database and sockets, or for a trainer.
  const auto directory = test_directory();
  cli::ChildOptions options;
  options.program = test::program_under_test();
  options.arguments = {"demo", "--steps", "10"};
  options.log_file = directory.path() / "log";
  options.environment = {"TMPDIR=" + directory.path().string()};
  options.max_open_files = 14;
  auto demo = cli::ChildProcess::spawn(options);
  REQUIRE(demo.has_value());
  const auto status = demo->wait(patience_ends());
  REQUIRE(status.has_value());
  const std::string log = test::read_text(options.log_file);
  INFO(log);
  CHECK(status->code == 1);
  CHECK(status->signal == 0);
  CHECK(log.find("dmoe demo: ") != std::string::npos);
}
