// What a stranger gets wrong, and what the program says to it: one line that names what failed and what to do.
#include "tests/e2e/program_run.hpp"
#include "tests/e2e/sockets.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/text.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>

using namespace dmoe;
using dmoe::test::Finished;
using dmoe::test::run_dmoe;
using dmoe::test::RunningNode;
using dmoe::test::test_directory;

namespace {

using test::contains;

/// Runs it with these options and requires an end with `status` whose last line holds all `parts`.
void check_refused(std::vector<std::string> command, const std::vector<std::string>& options, int status,
                   const std::vector<std::string>& parts, const std::vector<std::string>& environment = {}) {
  command.insert(command.end(), options.begin(), options.end());
  std::string line = "dmoe";
  for (const std::string& word : command) line += " " + word;
  INFO(line);
  const Finished run = run_dmoe(command, environment);
  INFO(run.err);
  CHECK(run.status.code == status);
  CHECK(run.status.signal == 0);
  CHECK(run.out.empty());
  const std::size_t end = run.err.empty() ? 0 : run.err.size() - 1;
  const std::string last = run.err.substr(end == 0 ? 0 : run.err.rfind('\n', end - 1) + 1);
  CHECK(last.starts_with("dmoe " + command.front()));
  for (const std::string& part : parts) {
    INFO(part);
    CHECK(contains(last, part));
  }
}

/// Both kinds of node; what goes wrong is the same for both.
std::vector<std::vector<std::string>> node_commands() {
  return {{"serve", "ffn.[0:1].[0:1]", "--expert", "nop", "--hidden-dim", "8", "--threads", "1"}, {"dht", "run"}};
}

}  // namespace

TEST_CASE("An address to listen at that cannot be bound is refused with what to give", "[e2e]") {
  const auto directory = test_directory();
  const std::vector<std::string> data{"--data-dir", directory.path().string()};
  for (const auto& command : node_commands()) {
    const auto listen = [&](const std::string& address) {
      std::vector<std::string> options = data;
      options.insert(options.end(), {"--listen", address, "--announce", "127.0.0.1:0"});
      return options;
    };
    check_refused(command, listen("localhost:0"), 2, {"--listen localhost:0", "'localhost' is a name", "127.0.0.1"});
    check_refused(command, listen("203.0.113.7:4040"), 1, {"203.0.113.7:4040", "no such address", "0.0.0.0:PORT"});
  }
}

TEST_CASE("A data directory that cannot be made is refused by its name", "[e2e]") {
  const auto directory = test_directory();
  const auto file = directory.path() / "file";
  test::write_text(file, "not a directory");
  for (const auto& command : node_commands()) {
    check_refused(command, {"--listen", "127.0.0.1:0", "--data-dir", file.string()}, 1, {file.string(), "--data-dir"});
  }
}

#ifdef NO_LOCKS_LIBRARY
TEST_CASE("e11 A data directory on a file system without locks is refused and not called in use", "[e2e][e11]") {
  const auto directory = test_directory();
  for (const auto& command : node_commands()) {
    check_refused(command, {"--listen", "127.0.0.1:0", "--data-dir", directory.path().string()}, 1,
                  {directory.path().string(), "cannot lock files", "local disk"}, {"LD_PRELOAD=" NO_LOCKS_LIBRARY});
  }
}
#endif

TEST_CASE("A key file that cannot be used is refused with what to do", "[e2e]") {
  const auto directory = test_directory();
  const auto garbage = directory.path() / "garbage.pem";
  test::write_text(garbage, "garbage");
  const auto open = directory.path() / "open.pem";
  test::write_text(open, "garbage");
  std::filesystem::permissions(garbage, std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  std::filesystem::permissions(open, std::filesystem::perms::all);
  const auto below_file = garbage / "identity.pem";
  for (const auto& command : node_commands()) {
    const auto identity = [&](const std::filesystem::path& path) {
      return std::vector<std::string>{"--listen",   "127.0.0.1:0", "--data-dir", (directory.path() / "data").string(),
                                      "--identity", path.string()};
    };
    check_refused(command, identity(garbage), 1, {garbage.string(), "Ed25519", "backup"});
    check_refused(command, identity(open), 1, {open.string(), "chmod 600"});
    check_refused(command, identity(directory.path()), 1, {directory.path().string(), "dmoe keygen"});
    check_refused(command, identity(below_file), 1, {below_file.string()});
  }
  check_refused({"keygen"}, {below_file.string()}, 1, {below_file.string()});
  check_refused({"keygen"}, {garbage.string()}, 1, {garbage.string(), "another file"});
  check_refused({"keygen"}, {""}, 2, {"FILE is empty"});
}

TEST_CASE("A ready descriptor that is not open is refused before anything starts", "[e2e]") {
  const auto directory = test_directory();
  for (const auto& command : node_commands()) {
    check_refused(command,
                  {"--listen", "127.0.0.1:0", "--data-dir", (directory.path() / "data").string(), "--ready-fd", "77"},
                  2, {"--ready-fd 77", "open for writing"});
  }
  CHECK_FALSE(std::filesystem::exists(directory.path() / "data"));
}

TEST_CASE("b6 Whoever cannot join says how to look at the initial peers", "[e2e]") {
  const test::HeldPort silent(test::HeldPort::Kind::kUdp);
  const std::string address = to_string(silent.endpoint());
  check_refused({"experts"}, {"--initial-peers", address, "--timeout", "0.3"}, 1, {address, "dmoe dht ping"});
  check_refused({"train"}, {"--initial-peers", address, "--join-timeout", "0.3"}, 1, {address, "dmoe dht ping"});
}

TEST_CASE("Options that no server can have are refused in the words of the command line", "[e2e]") {
  const auto directory = test_directory();
  const std::vector<std::string> serve{"serve", "ffn.0.[0:1]", "--threads",   "1",          "--hidden-dim",
                                       "8",     "--listen",    "127.0.0.1:0", "--data-dir", directory.path().string()};
  check_refused(serve, {"--schedule", "linear"}, 1, {"--total-steps", "--warmup-steps"});
  check_refused(serve, {"--expert-arg", "depth=3"}, 1, {"depth", "--expert-arg"});
  check_refused(serve, {"--expert", "script"}, 1, {"--expert-arg file=PATH"});
  check_refused(serve, {"--expert", "transformer", "--expert-arg", "heads=3"}, 1, {"heads=3", "--hidden-dim 8"});
}

TEST_CASE("A trainer whose model does not fit the experts says what to change", "[e2e]") {
  const auto directory = test_directory();
  const RunningNode server(directory.path(), "server",
                           {"serve", "ffn.[0:1].[0:1]", "--expert", "nop", "--hidden-dim", "8", "--threads", "1"});
  const std::vector<std::string> train{"train", "--initial-peers", server.address(), "--steps", "2", "--patience",
                                       "0.1"};
  const auto last_line = [&](const std::vector<std::string>& options) {
    std::vector<std::string> command = train;
    command.insert(command.end(), options.begin(), options.end());
    const Finished run = run_dmoe(command);
    INFO(run.err);
    CHECK(run.status.code == 1);
    return run.err;
  };
  const std::string width = last_line({"--grid-size", "1", "1", "--hidden-dim", "16"});
  CHECK(contains(width, "[rows, 8]"));
  CHECK(contains(width, "give the --hidden-dim that the servers have"));
  const std::string grid = last_line({"--grid", "gnn", "--grid-size", "1", "1", "--hidden-dim", "8"});
  CHECK(contains(grid, "'gnn'"));
  CHECK(contains(grid, "Start servers"));
}

TEST_CASE("Weights are saved and loaded by a trainer", "[e2e]") {
  const auto directory = test_directory();
  const RunningNode server(directory.path(), "server",
                           {"serve", "ffn.[0:1].[0:2]", "--expert", "nop", "--hidden-dim", "8", "--threads", "1"});
  const std::string file = (directory.path() / "model.pt").string();
  const auto train = [&](const std::vector<std::string>& options, const std::string& grid = "1,2") {
    std::vector<std::string> command{
        "train", "--initial-peers", server.address(), "--grid-size", grid, "--hidden-dim", "8", "--steps", "20"};
    command.insert(command.end(), options.begin(), options.end());
    return run_dmoe(command);
  };
  const auto accuracy = [](const Finished& run) {
    const std::string last = run.out.substr(run.out.rfind('\n', run.out.size() - 2) + 1);
    return nlohmann::json::parse(last).at("test_accuracy").get<double>();
  };
  const Finished first = train({"--save", file, "--json"});
  INFO(first.out << first.err);
  REQUIRE(first.status.code == 0);
  CHECK(contains(first.out, "model saved to"));
  // A learning rate of 0 leaves the loaded weights as they are, and these experts have none.
  const Finished second = train({"--load", file, "--learning-rate", "0", "--json"});
  INFO(second.out << second.err);
  REQUIRE(second.status.code == 0);
  CHECK(accuracy(first) == accuracy(second));
  const Finished other = train({"--load", file}, "1,3");
  CHECK(other.status.code == 1);
  CHECK(contains(other.err, "--grid-size"));
  const Finished nowhere = train({"--save", (directory.path() / "missing" / "model.pt").string()});
  CHECK(nowhere.status.code == 1);
  CHECK(contains(nowhere.err, "--save"));
}

TEST_CASE("b9 A node that may be alone is ready and usable while its initial peers are dead", "[e2e]") {
  const auto directory = test_directory();
  const test::HeldPort silent(test::HeldPort::Kind::kUdp);
  const RunningNode node(directory.path(), "node",
                         {"dht", "run", "--initial-peers", to_string(silent.endpoint()), "--allow-alone"});
  CHECK(contains(node.log(), "alone for now"));
  const Finished put = run_dmoe({"dht", "put", "k", "v", "--initial-peers", node.address()});
  INFO(put.err);
  CHECK(put.out == "stored on 1 node for 1h\n");
  const RunningNode server(directory.path(), "server",
                           {"serve", "ffn.[0:1].[0:2]", "--expert", "nop", "--hidden-dim", "8", "--threads", "1",
                            "--num-experts", "1", "--initial-peers", to_string(silent.endpoint()), "--allow-alone"});
  CHECK(server.ready().experts.size() == 1);
}
