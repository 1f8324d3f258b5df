// `dmoe dht get`, `put`, `ping` and `stats` with real nodes.
#include "tests/e2e/program_run.hpp"
#include "tests/e2e/sockets.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/text.hpp"

#include <nlohmann/json.hpp>

using namespace dmoe;
using dmoe::test::Finished;
using dmoe::test::HeldPort;
using dmoe::test::run_dmoe;
using dmoe::test::RunningNode;
using dmoe::test::test_directory;

namespace {

using test::contains;

/// `dmoe dht <arguments> --initial-peers <node>`
Finished ask(const RunningNode& node, std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "dht");
  arguments.insert(arguments.end(), {"--initial-peers", node.address()});
  return run_dmoe(arguments);
}

}  // namespace

TEST_CASE("b9 A value put into a network of one node is found and said to be on 1 node", "[e2e]") {
  const auto directory = test_directory();
  const RunningNode node(directory.path(), "dht", {"dht", "run"});
  const Finished put = ask(node, {"put", "greeting", "hello world"});
  INFO(put.err);
  CHECK(put.status.code == 0);
  CHECK(put.out == "stored on 1 node for 1h\n");
  const Finished get = ask(node, {"get", "greeting"});
  INFO(get.err);
  CHECK(get.status.code == 0);
  CHECK(get.out == "hello world");
  CHECK(get.err.empty());
}

TEST_CASE("A value that a client put is found through every node after the client is gone", "[e2e]") {
  const auto directory = test_directory();
  const RunningNode first(directory.path(), "first", {"dht", "run"});
  const RunningNode second(directory.path(), "second", {"dht", "run", "--initial-peers", first.address()});
  const RunningNode third(directory.path(), "third", {"dht", "run", "--initial-peers", first.address()});
  const Finished put = ask(second, {"put", "k", "v", "--ttl", "15m", "--json"});
  INFO(put.err);
  REQUIRE(put.status.code == 0);
  const auto stored = nlohmann::json::parse(put.out);
  CHECK(stored.at("nodes").get<int>() >= 2);
  CHECK(stored.at("ttl_seconds") == 900);
  for (const RunningNode* node : {&first, &second, &third}) {
    const Finished get = ask(*node, {"get", "k", "--json"});
    INFO(get.err);
    REQUIRE(get.status.code == 0);
    const auto json = nlohmann::json::parse(get.out);
    REQUIRE(json.at("records").size() == 1);
    const auto& record = json.at("records").at(0);
    CHECK(record.at("value") == "v");
    CHECK(record.at("publisher") == stored.at("publisher"));
    CHECK(record.at("sequence") == stored.at("sequence"));
    CHECK(record.at("remaining_seconds").get<double>() <= 900);
    CHECK(record.at("remaining_seconds").get<double>() > 900 - 120);
  }
}

TEST_CASE("Bytes of any kind come back as they were put", "[e2e]") {
  const auto directory = test_directory();
  const RunningNode node(directory.path(), "dht", {"dht", "run"});
  std::string bytes;
  for (int i = 0; i < 65'536; ++i) bytes += static_cast<char>(i * 7);
  const auto file = directory.path() / "value";
  test::write_text(file, bytes);
  const Finished put = ask(node, {"put", "large", "--file", file.string()});
  INFO(put.err);
  REQUIRE(put.status.code == 0);
  CHECK(ask(node, {"get", "large"}).out == bytes);
  const auto json = nlohmann::json::parse(ask(node, {"get", "large", "--json"}).out);
  CHECK(json.at("records").at(0).at("bytes") == 65'536);
  CHECK(json.at("records").at(0).contains("value_base64"));
  CHECK_FALSE(json.at("records").at(0).contains("value"));
  test::write_text(file, bytes + "x");
  const Finished larger = ask(node, {"put", "larger", "--file", file.string()});
  CHECK(larger.status.code == 2);
  CHECK(contains(larger.err, "64 KiB"));
}

TEST_CASE("Subkeys keep records apart and an identity replaces its own", "[e2e]") {
  const auto directory = test_directory();
  const RunningNode node(directory.path(), "dht", {"dht", "run"});
  const std::string identity = (directory.path() / "publisher.pem").string();
  const auto put = [&](const std::string& subkey, const std::string& value) {
    const Finished run = ask(node, {"put", "k", value, "--subkey", subkey, "--identity", identity});
    INFO(run.err);
    CHECK(run.status.code == 0);
  };
  put("a", "old");
  put("b", "other");
  put("a", "new");
  const auto json = nlohmann::json::parse(ask(node, {"get", "k", "--json"}).out);
  REQUIRE(json.at("records").size() == 2);
  CHECK(json.at("records").at(0).at("subkey") == "a");  // The newest comes first.
  CHECK(json.at("records").at(0).at("value") == "new");
  CHECK(json.at("records").at(1).at("value") == "other");
  const Finished one = ask(node, {"get", "k", "--subkey", "b"});
  CHECK(one.out == "other");
  CHECK(one.err.empty());
  const Finished newest = ask(node, {"get", "k"});
  CHECK(newest.out == "new");
  CHECK(contains(newest.err, "--all"));
  const Finished all = ask(node, {"get", "k", "--all"});
  CHECK(contains(all.out, "a  "));
  CHECK(contains(all.out, "5 bytes  other"));
  CHECK(ask(node, {"get", "k", "--publisher", "0123456789abcdef"}).status.code == 1);
}

TEST_CASE("A key without records is a failed run that says so", "[e2e]") {
  const auto directory = test_directory();
  const RunningNode node(directory.path(), "dht", {"dht", "run"});
  const Finished get = ask(node, {"get", "nothing here"});
  CHECK(get.status.code == 1);
  CHECK(get.out.empty());
  CHECK(contains(get.err, "dmoe dht get: "));
  CHECK(contains(get.err, "'nothing here'"));
  const Finished json = ask(node, {"get", "nothing here", "--json"});
  CHECK(json.status.code == 1);
  CHECK(nlohmann::json::parse(json.out).at("records").empty());
}

TEST_CASE("b6 Records commands list dead initial peers and what to do", "[e2e]") {
  const HeldPort silent(HeldPort::Kind::kUdp);
  const std::string address = to_string(silent.endpoint());
  for (std::vector<std::string> command :
       {std::vector<std::string>{"dht", "get", "k"}, std::vector<std::string>{"dht", "put", "k", "v"}}) {
    command.insert(command.end(), {"--initial-peers", address, "--timeout", "0.3"});
    const Finished run = run_dmoe(command);
    INFO(run.err);
    CHECK(run.status.code == 1);
    CHECK(contains(run.err, address));
    CHECK(contains(run.err, "dmoe dht ping"));
  }
}

TEST_CASE("A ping names the peer and the address that it sees", "[e2e]") {
  const auto directory = test_directory();
  const RunningNode node(directory.path(), "dht", {"dht", "run"});
  for (const std::string& address : {node.address(), "localhost:" + std::to_string(node.endpoint().port)}) {
    const Finished run = run_dmoe({"dht", "ping", address, "--json"});
    INFO(run.err);
    REQUIRE(run.status.code == 0);
    const auto json = nlohmann::json::parse(run.out);
    CHECK(json.at("peer_id") == node.ready().peer_id);
    CHECK(json.at("round_trip_ms").get<double>() > 0);
    CHECK(contains(json.at("observed").get<std::string>(), "127.0.0.1:"));
  }
  const Finished text = run_dmoe({"dht", "ping", node.address()});
  CHECK(contains(text.out, node.ready().peer_id));
  CHECK(contains(text.out, "round trip"));
}

TEST_CASE("A ping that nobody answers is a failed run that says what to check", "[e2e]") {
  const HeldPort silent(HeldPort::Kind::kUdp);
  for (const std::string& address : {to_string(silent.endpoint()), std::string("no-such-host.invalid:4040")}) {
    for (const char* question : {"ping", "stats"}) {
      const Finished run = run_dmoe({"dht", question, address, "--timeout", "0.3"});
      INFO(run.err);
      CHECK(run.status.code == 1);
      CHECK(contains(run.err, address.substr(0, address.find(':'))));
      CHECK(contains(run.err, "firewall"));
    }
  }
}

TEST_CASE("A node tells its statistics", "[e2e]") {
  const auto directory = test_directory();
  const RunningNode first(directory.path(), "first", {"dht", "run"});
  const RunningNode second(directory.path(), "second", {"dht", "run", "--initial-peers", first.address()});
  REQUIRE(ask(first, {"put", "k", "v"}).status.code == 0);
  nlohmann::json json;
  CHECK(test::eventually([&] {
    const Finished run = run_dmoe({"dht", "stats", second.address(), "--json"});
    json = nlohmann::json::parse(run.out);
    return json.at("nodes_known") == 1 && json.at("records_held") == 1;
  }));
  CHECK(json.at("source") == "node");
  CHECK(json.at("peer_id") == second.ready().peer_id);
  CHECK(json.at("datagrams_received").get<int>() > 0);
  const Finished text = run_dmoe({"dht", "stats", second.address()});
  CHECK(contains(text.out, "nodes known"));
  CHECK(contains(text.out, "records held"));
}

TEST_CASE("An expert server tells its statistics like any node", "[e2e]") {
  const auto directory = test_directory();
  const RunningNode server(directory.path(), "server",
                           {"serve", "ffn.[0:1].[0:1]", "--expert", "nop", "--hidden-dim", "8", "--threads", "1"});
  const Finished run = run_dmoe({"dht", "stats", server.address(), "--json"});
  INFO(run.err);
  REQUIRE(run.status.code == 0);
  const auto json = nlohmann::json::parse(run.out);
  CHECK(json.at("peer_id") == server.ready().peer_id);
  CHECK(json.at("source") == "node");
  CHECK(json.at("nodes_known") == 0);   // It is the first one.
  CHECK(json.at("records_held") == 2);  // Under ffn. and ffn.0.
  CHECK(contains(test::http_get(server.endpoint(), "/metrics"), "dmoe_dht_stored_records 2"));
}

TEST_CASE("An option of a node given to a command without one is refused and named", "[e2e]") {
  const auto directory = test_directory();
  const RunningNode node(directory.path(), "dht", {"dht", "run"});
  for (std::vector<std::string> arguments :
       {std::vector<std::string>{"dht", "put", "k", "v", "--listen", "127.0.0.1:0"},
        std::vector<std::string>{"dht", "--allow-alone", "get", "k"},
        std::vector<std::string>{"dht", "--data-dir", directory.path().string(), "put", "k", "v"}}) {
    arguments.insert(arguments.end(), {"--initial-peers", node.address()});
    const Finished run = run_dmoe(arguments);
    INFO(run.err);
    CHECK(run.status.code == 2);
    CHECK(contains(run.err, "'dmoe dht run'"));
    CHECK(run.out.empty());
  }
  // The same in the node's section of a file is for the node.
  const auto config = directory.path() / "dmoe.toml";
  test::write_text(config, "[dht]\nlisten = \"127.0.0.1:0\"\ninitial-peers = [\"" + node.address() + "\"]\n");
  const Finished put = run_dmoe({"--config", config.string(), "dht", "put", "k", "v"});
  INFO(put.err);
  CHECK(put.status.code == 0);
}

TEST_CASE("Initial peers of the dht section serve its records commands", "[e2e]") {
  const auto directory = test_directory();
  const RunningNode node(directory.path(), "dht", {"dht", "run"});
  const auto config = directory.path() / "dmoe.toml";
  test::write_text(config, "[dht]\ninitial-peers = [\"" + node.address() + "\"]\n[dht.put]\nttl = \"5m\"\n");
  const Finished put = run_dmoe({"--config", config.string(), "dht", "put", "k", "v"});
  INFO(put.err);
  CHECK(put.status.code == 0);
  CHECK(contains(put.out, "for 5m"));
}
