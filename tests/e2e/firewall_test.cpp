// Servers whose port others cannot reach: on two hosts with a firewall, and behind a port that nobody forwards.
#include "cli/child_process.hpp"
#include "tests/e2e/program_run.hpp"
#include "tests/e2e/sockets.hpp"
#include "tests/e2e/two_hosts.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/text.hpp"

#include <nlohmann/json.hpp>

#include <csignal>

using namespace dmoe;
using dmoe::test::contains;
using dmoe::test::eventually;
using dmoe::test::HeldPort;
using dmoe::test::patience_ends;
using dmoe::test::run_dmoe;
using dmoe::test::RunningNode;
using dmoe::test::test_directory;
using dmoe::test::TwoHosts;

namespace {

/// A program that is not ready yet.
class Starting {
 public:
  Starting(std::filesystem::path program, std::vector<std::string> arguments, std::filesystem::path log)
      : log_(std::move(log)), process_(spawn(std::move(program), std::move(arguments), log_)) {}

  std::string log() const { return test::read_text(log_); }
  cli::ChildProcess& process() { return process_; }
  cli::ReadyLine ready() {
    const auto line = process_.ready_line(patience_ends());
    if (!line) throw std::runtime_error(describe(line.error()) + "; it printed:\n" + log());
    return cli::parse_ready_line(*line).value();
  }

 private:
  static cli::ChildProcess spawn(std::filesystem::path program, std::vector<std::string> arguments,
                                 const std::filesystem::path& log) {
    cli::ChildOptions options;
    options.program = std::move(program);
    options.arguments = std::move(arguments);
    options.arguments.insert(options.arguments.end(), {"--ready-fd", std::to_string(cli::kReadyDescriptor)});
    options.log_file = log;
    options.ready_pipe = true;
    auto child = cli::ChildProcess::spawn(options);
    if (!child) throw std::runtime_error(describe(child.error()));
    return *std::move(child);
  }

  std::filesystem::path log_;
  cli::ChildProcess process_;
};

std::vector<std::string> server_kept_in(const std::filesystem::path& directory, std::vector<std::string> more) {
  std::vector<std::string> arguments{"serve",
                                     "ffn.[0:1].[0:2]",
                                     "--expert",
                                     "nop",
                                     "--hidden-dim",
                                     "8",
                                     "--threads",
                                     "1",
                                     "--heartbeat",
                                     "0.5",
                                     "--announcement-ttl",
                                     "5",
                                     "--data-dir",
                                     (directory / "server").string()};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

}  // namespace

TEST_CASE("b17 b18 A server that others cannot reach announces nothing until they can", "[e2e][b17][b18]") {
  const auto directory = test_directory();
  const RunningNode node(directory.path(), "dht", {"dht", "run"});
  HeldPort announced(HeldPort::Kind::kClosedTcp);  // A port that nobody forwards yet.
  const std::string address = to_string(announced.endpoint());
  Starting server(test::program_under_test(),
                  server_kept_in(directory.path(),
                                 {"--listen", "127.0.0.1:0", "--announce", address, "--initial-peers", node.address()}),
                  directory.path() / "server.log");
  const std::string complaint = "cannot reach this server at " + address;
  REQUIRE(eventually([&] { return contains(server.log(), complaint); }));
  const auto listing = [&] { return run_dmoe({"experts", "ffn", "--initial-peers", node.address()}).out; };
  CHECK_FALSE(contains(listing(), "ffn.0.0"));

  announced.open();
  const auto ready = server.ready();
  INFO(server.log());
  CHECK(contains(server.log(), "other nodes reach this server at " + address));
  CHECK(contains(listing(), "ffn.0.0"));
  CHECK(count(server.log(), complaint) == 1);  // Not at each try.
  REQUIRE(ready.announced.size() == 1);
  CHECK(to_string(ready.announced.front()) == address);  // --announce wins over the bound port.
  const auto status = nlohmann::json::parse(test::http_get(ready.listen, "/api/v1/status"));
  REQUIRE(status.at("endpoints").size() == 1);
  CHECK(status.at("endpoints").at(0).at("endpoint") == address);
  CHECK(status.at("endpoints").at(0).at("reachable") == true);
}

TEST_CASE("b18 A server that waits to be reached ends at once when it is told to", "[e2e][b18]") {
  const auto directory = test_directory();
  const RunningNode node(directory.path(), "dht", {"dht", "run"});
  const HeldPort announced(HeldPort::Kind::kClosedTcp);
  Starting server(
      test::program_under_test(),
      server_kept_in(directory.path(), {"--listen", "127.0.0.1:0", "--announce", to_string(announced.endpoint()),
                                        "--initial-peers", node.address()}),
      directory.path() / "server.log");
  REQUIRE(eventually([&] { return contains(server.log(), "cannot reach this server"); }));
  server.process().send(SIGTERM);
  const auto status = server.process().wait(patience_ends());
  REQUIRE(status.has_value());
  CHECK(status->code == 0);
}

TEST_CASE("b17 b18 Behind a firewall on another host a server says so and is announced once it opens",
          "[e2e][b17][b18]") {
  if (const auto refusal = TwoHosts::refusal()) {
    WARN("not run: " + *refusal);
    return;
  }
  const auto directory = test_directory();
  TwoHosts hosts;
  const std::string program = test::program_under_test().string();
  const std::string node_address = std::string(TwoHosts::kSecond) + ":4040";
  const std::string server_address = std::string(TwoHosts::kFirst) + ":4041";
  Starting node(TwoHosts::program(),
                hosts.on_second({program, "dht", "run", "--listen", node_address, "--data-dir",
                                 (directory.path() / "dht").string()}),
                directory.path() / "dht.log");
  (void)node.ready();
  hosts.block_tcp(4041);
  std::vector<std::string> serve = server_kept_in(
      directory.path(), {"--listen", "0.0.0.0:4041", "--announce", server_address, "--initial-peers", node_address});
  serve.insert(serve.begin(), program);
  Starting server(TwoHosts::program(), hosts.on_first(std::move(serve)), directory.path() / "server.log");
  const std::string complaint = "cannot reach this server at " + server_address;
  REQUIRE(eventually([&] { return contains(server.log(), complaint); }));

  hosts.unblock_tcp();
  const auto ready = server.ready();
  INFO(server.log());
  CHECK(to_string(ready.announced.front()) == server_address);
  CHECK(contains(server.log(), "other nodes reach this server at " + server_address));
  CHECK(count(server.log(), complaint) == 1);
}
