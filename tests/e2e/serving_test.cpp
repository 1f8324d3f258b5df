// How servers start, what they refuse, and how they end: real processes, real ports.
#include "cli/child_process.hpp"
#include "dmoe/client.hpp"
#include "tests/e2e/program_run.hpp"
#include "tests/e2e/sockets.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/text.hpp"

#include <nlohmann/json.hpp>

#include <csignal>
#include <iterator>
#include <sstream>

using namespace dmoe;
using dmoe::test::eventually;
using dmoe::test::Finished;
using dmoe::test::HeldPort;
using dmoe::test::patience_ends;
using dmoe::test::run_dmoe;
using dmoe::test::RunningNode;
using dmoe::test::test_directory;

namespace {

using test::contains;

std::vector<std::string> small_server(const std::string& pattern, std::vector<std::string> more = {}) {
  std::vector<std::string> arguments{"serve", pattern, "--expert", "nop", "--hidden-dim", "8", "--threads", "1"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

std::vector<std::string> with_directory(std::vector<std::string> arguments, const std::filesystem::path& directory) {
  arguments.insert(arguments.end(), {"--data-dir", directory.string()});
  return arguments;
}

std::shared_ptr<Client> client_of(const RunningNode& node) {
  return Client::connect(ClientOptions().initial_endpoints({node.endpoint()}));
}

}  // namespace

TEST_CASE("b9 A first node alone serves and is listed", "[e2e]") {
  const auto directory = test_directory();
  const RunningNode server(directory.path(), "server", small_server("ffn.[0:2].[0:3]"));
  CHECK(server.ready().experts.size() == 6);
  const Finished listing = run_dmoe({"experts", "ffn", "--initial-peers", server.address(), "--json", "--check"});
  INFO(listing.err);
  REQUIRE(listing.status.code == 0);
  const auto json = nlohmann::json::parse(listing.out);
  REQUIRE(json.at("experts").size() == 6);
  CHECK(json.at("experts").at(0).at("uid") == "ffn.0.0");
  CHECK(json.at("experts").at(0).at("servers").at(0).at("peer_id") == server.ready().peer_id);
  for (const auto& expert : json.at("experts")) CHECK(expert.at("answers") == true);
  const Finished below = run_dmoe({"experts", "ffn.1.", "--initial-peers", server.address()});
  CHECK(contains(below.out, "ffn.1.2"));
  CHECK_FALSE(contains(below.out, "ffn.0."));
}

TEST_CASE("A server with few experts in memory answers for all of them and logs JSON", "[e2e]") {
  const auto directory = test_directory();
  const RunningNode server(
      directory.path(), "server",
      small_server("ffn.[0:2].[0:3]", {"--max-resident-experts", "2", "--max-memory", "128", "--log-format", "json"}));
  for (int i = 0; i < 2; ++i) {  // Twice: every expert has been on disk meanwhile.
    const Finished listing = run_dmoe({"experts", "ffn", "--initial-peers", server.address(), "--json", "--check"});
    REQUIRE(listing.status.code == 0);
    const auto experts = nlohmann::json::parse(listing.out).at("experts");
    CHECK(experts.size() == 6);
    for (const auto& expert : experts) CHECK(expert.at("answers") == true);
  }
  std::istringstream log(server.log());
  std::size_t lines = 0;
  for (std::string line; std::getline(log, line);) {
    if (!line.starts_with('{')) continue;  // The report on stdout is for people.
    CHECK(nlohmann::json::parse(line).contains("message"));
    ++lines;
  }
  CHECK(lines > 0);
}

TEST_CASE("e10 A started server prints its key and addresses and how to join it", "[e2e]") {
  const auto directory = test_directory();
  RunningNode server(directory.path(), "server", small_server("ffn.[0:1].[0:1]"));
  const std::string log = server.log();
  INFO(log);
  CHECK(contains(log, (directory.path() / "server" / "identity.pem").string()));
  CHECK(contains(log, server.ready().peer_id));
  CHECK(contains(log, "listening  " + server.address()));
  CHECK(contains(log, "dmoe serve ffn.1.0"));
  CHECK(contains(log, "--initial-peers " + server.address()));
  CHECK(contains(log, "Other machines cannot reach this loopback address"));
}

TEST_CASE("e10 The line that a started server prints for joining it works as it stands", "[e2e][e10]") {
  const auto directory = test_directory();
  RunningNode first(directory.path(), "first", small_server("ffn.[0:1].[0:1]"));
  std::istringstream log(first.log());
  std::string line;
  while (std::getline(log, line) && line.find("--initial-peers") == std::string::npos) {
  }
  INFO(line);
  std::erase(line, '\'');  // As a shell takes the quotes away.
  std::istringstream words(line);
  std::vector<std::string> arguments{std::istream_iterator<std::string>(words), {}};
  REQUIRE(arguments.size() > 2);
  REQUIRE(arguments.front() == "dmoe");
  arguments.erase(arguments.begin());
  const RunningNode second(directory.path(), "second", arguments);
  const Finished listing = run_dmoe({"experts", "ffn", "--initial-peers", second.address(), "--json"});
  INFO(listing.out << listing.err);
  CHECK(listing.status.code == 0);
  CHECK(contains(listing.out, first.ready().peer_id));
}

TEST_CASE("e9 Exactly the announced addresses are announced in whichever way they are given", "[e2e][e9]") {
  const auto directory = test_directory();
  const std::string a = "127.0.0.1:4040";
  const std::string b = "192.0.2.1:4041";
  const std::vector<std::vector<std::string>> ways{
      {"--announce", a, b}, {"--announce", a, "--announce", b}, {"--announce", a + "," + b}};
  for (const auto& way : ways) {
    RunningNode server(directory.path(), "server", small_server("ffn.[0:1].[0:1]", way));
    REQUIRE(server.ready().announced.size() == 2);
    CHECK(net::to_string(server.ready().announced[0]) == a);
    CHECK(net::to_string(server.ready().announced[1]) == b);
    CHECK(contains(server.log(), a));
    CHECK(contains(server.log(), b));
    CHECK(server.process().stop(patience_ends()).code == 0);
  }
}

TEST_CASE("A server says that it lives and is ready and counts calls over HTTP", "[e2e]") {
  const auto directory = test_directory();
  const RunningNode server(directory.path(), "server", small_server("ffn.[0:1].[0:1]"));
  CHECK_FALSE(test::http_get(server.endpoint(), "/healthz").empty());
  CHECK_FALSE(test::http_get(server.endpoint(), "/readyz").empty());
  CHECK(contains(test::http_get(server.endpoint(), "/metrics"), "# TYPE"));
  const RunningNode node(directory.path(), "dht", {"dht", "run", "--initial-peers", server.address()});
  CHECK_FALSE(test::http_get(node.endpoint(), "/healthz").empty());
  CHECK_FALSE(test::http_get(node.endpoint(), "/readyz").empty());
  CHECK(eventually([&] { return contains(test::http_get(node.endpoint(), "/metrics"), "dmoe_dht_known_nodes 1"); }));
}

TEST_CASE("b21 A port in use is a failed start that names it", "[e2e]") {
  const auto directory = test_directory();
  for (const auto kind : {HeldPort::Kind::kTcp, HeldPort::Kind::kUdp}) {
    const HeldPort held(kind);
    const std::string address = to_string(held.endpoint());
    const Finished run =
        run_dmoe(with_directory(small_server("ffn.[0:1].[0:1]", {"--listen", address}), directory.path()));
    INFO(run.err);
    CHECK(run.status.code == 1);
    CHECK(contains(run.err, address));
    const Finished dht = run_dmoe(with_directory({"dht", "run", "--listen", address}, directory.path()));
    INFO(dht.err);
    CHECK(dht.status.code == 1);
    CHECK(contains(dht.err, address));
  }
}

TEST_CASE("b21 A server may start again at once on the port that it had", "[e2e]") {
  const auto directory = test_directory();
  std::string address = "127.0.0.1:0";
  std::string peer_id;
  for (const int signal : {SIGTERM, SIGKILL, SIGTERM}) {
    RunningNode server(directory.path(), "server", small_server("ffn.[0:1].[0:2]", {"--listen", address}));
    if (peer_id.empty()) peer_id = server.ready().peer_id;
    CHECK(server.ready().peer_id == peer_id);
    address = server.address();
    (void)client_of(server)->list_experts("ffn", 2);  // Connections to the port that are not closed yet.
    server.process().send(signal);
    REQUIRE(server.process().wait(patience_ends()).has_value());
  }
}

TEST_CASE("A data directory in use is a failed start and does not disturb its user", "[e2e]") {
  const auto directory = test_directory();
  const auto data = directory.path() / "data";
  const RunningNode server(directory.path(), "server", with_directory(small_server("ffn.[0:1].[0:1]"), data));
  const Finished second = run_dmoe(with_directory(small_server("ffn.[0:1].[0:1]"), data));
  INFO(second.err);
  CHECK(second.status.code == 1);
  CHECK(contains(second.err, data.string()));
  CHECK(contains(second.err, "use"));
  CHECK(client_of(server)->list_experts("ffn", 2).size() == 1);

  const auto dht_data = directory.path() / "dht-data";
  const RunningNode node(directory.path(), "dht", with_directory({"dht", "run"}, dht_data));
  const Finished other = run_dmoe(with_directory({"dht", "run", "--listen", "127.0.0.1:0"}, dht_data));
  INFO(other.err);
  CHECK(other.status.code == 1);
  CHECK(contains(other.err, dht_data.string()));
}

TEST_CASE("b6 Two dead initial peers and a live one are enough", "[e2e]") {
  const auto directory = test_directory();
  const RunningNode node(directory.path(), "dht", {"dht", "run"});
  const HeldPort silent(HeldPort::Kind::kUdp);
  const RunningNode server(directory.path(), "server",
                           small_server("ffn.[0:1].[0:1]", {"--initial-peers", to_string(silent.endpoint()),
                                                            "127.0.0.1:1", node.address()}));
  CHECK(client_of(node)->list_experts("ffn", 2).size() == 1);
}

TEST_CASE("b6 Dead initial peers are listed with their reasons", "[e2e]") {
  const auto directory = test_directory();
  const HeldPort silent(HeldPort::Kind::kUdp);
  const std::string address = to_string(silent.endpoint());
  const std::vector<std::string> peers{"--initial-peers", address, "127.0.0.1:1", "--join-timeout", "0.5"};
  std::vector<std::vector<std::string>> commands{
      with_directory(small_server("ffn.[0:1].[0:1]", peers), directory.path()),
      with_directory({"dht", "run", "--listen", "127.0.0.1:0"}, directory.path())};
  commands.back().insert(commands.back().end(), peers.begin(), peers.end());
  for (const auto& command : commands) {
    const Finished run = run_dmoe(command);
    INFO(run.err);
    CHECK(run.status.code == 1);
    CHECK(contains(run.err, address));
    CHECK(contains(run.err, "127.0.0.1:1"));
    CHECK(contains(run.err, "--allow-alone"));
  }
}

TEST_CASE("b6 A server that may be alone joins when its peer comes back", "[e2e]") {
  const auto directory = test_directory();
  std::string address;
  {
    RunningNode gone(directory.path(), "dht", {"dht", "run"});
    address = gone.address();
    CHECK(gone.process().stop(patience_ends()).code == 0);
  }
  const RunningNode server(directory.path(), "server",
                           small_server("ffn.[0:1].[0:1]", {"--initial-peers", address, "--join-timeout", "0.3",
                                                            "--allow-alone", "--heartbeat", "0.5"}));
  const RunningNode back(directory.path(), "dht", {"dht", "run", "--listen", address});
  const auto client = client_of(back);
  CHECK(eventually([&] { return client->list_experts("ffn", 2).size() == 1; }));
}

TEST_CASE("b26 Experts are gone from lookups when a server was told to stop", "[e2e]") {
  const auto directory = test_directory();
  const RunningNode node(directory.path(), "dht", {"dht", "run"});
  // Announced for so long that only a withdrawal can remove them while this test runs.
  RunningNode server(
      directory.path(), "server",
      small_server("ffn.[0:2].[0:2]", {"--initial-peers", node.address(), "--announcement-ttl", "3000"}));
  const auto client = client_of(node);
  REQUIRE(client->list_experts("ffn", 2).size() == 4);
  const cli::ExitStatus status = server.process().stop(patience_ends());
  CHECK(status.code == 0);
  CHECK(status.signal == 0);
  CHECK(client->list_experts("ffn", 2).empty());
}

TEST_CASE("e2 Every signal to stop ends an idle server with status 0", "[e2e]") {
  const auto directory = test_directory();
  for (const int signal : {SIGTERM, SIGINT}) {
    RunningNode server(directory.path(), "server", small_server("ffn.[0:1].[0:1]"));
    RunningNode node(directory.path(), "dht", {"dht", "run"});
    for (RunningNode* running : {&server, &node}) {
      running->process().send(signal);
      const auto status = running->process().wait(patience_ends());
      REQUIRE(status.has_value());
      CHECK(status->code == 0);
      CHECK(status->signal == 0);
    }
  }
}

TEST_CASE("e2 A signal while a server still waits for its peers ends it", "[e2e]") {
  const auto directory = test_directory();
  const HeldPort silent(HeldPort::Kind::kUdp);
  for (std::vector<std::string> arguments : {small_server("ffn.[0:1].[0:1]"), std::vector<std::string>{"dht", "run"}}) {
    arguments.insert(arguments.end(), {"--initial-peers", to_string(silent.endpoint()), "--join-timeout", "3000",
                                       "--listen", "127.0.0.1:0", "--data-dir", (directory.path() / "data").string()});
    cli::ChildOptions options;
    options.program = test::program_under_test();
    options.arguments = arguments;
    options.log_file = directory.path() / "log";
    auto child = cli::ChildProcess::spawn(options);
    REQUIRE(child.has_value());
    // It keeps its key before it joins, and by then it listens for signals.
    REQUIRE(eventually([&] { return std::filesystem::exists(directory.path() / "data" / "identity.pem"); }));
    const cli::ExitStatus status = child->stop(patience_ends());
    CHECK(status.code == 0);
    CHECK(status.signal == 0);
    std::filesystem::remove_all(directory.path() / "data");
  }
}

TEST_CASE("e1 A low soft limit of open files is raised to the hard limit", "[e2e]") {
  const auto directory = test_directory();
  cli::ChildOptions options;
  options.program = "/bin/sh";
  options.arguments = {"-c",
                       "ulimit -S -n 64; exec \"$0\" \"$@\"",
                       test::program_under_test().string(),
                       "dht",
                       "run",
                       "--listen",
                       "127.0.0.1:0",
                       "--data-dir",
                       directory.path().string(),
                       "--ready-fd",
                       "3"};
  options.log_file = directory.path() / "log";
  options.ready_pipe = true;
  auto child = cli::ChildProcess::spawn(options);
  REQUIRE(child.has_value());
  REQUIRE(child->ready_line(patience_ends()).has_value());
  const std::string limits = test::read_text("/proc/" + std::to_string(child->pid()) + "/limits");
  const std::size_t line = limits.find("Max open files");
  REQUIRE(line != std::string::npos);
  std::istringstream fields(limits.substr(line + std::string("Max open files").size()));
  std::string soft;
  std::string hard;
  fields >> soft >> hard;
  CHECK(soft == hard);
}
