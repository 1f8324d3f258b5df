// Calls seen from both sides.
#include "dmoe/client.hpp"
#include "dmoe/dmoe.hpp"
#include "dmoe/remote_expert.hpp"
#include "expert_server/server.hpp"
#include "tests/dmoe/swarm.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temporary_folder.hpp"

#include <nlohmann/json.hpp>

#include <fstream>
#include <iterator>
#include <map>
#include <set>

namespace dmoe {
namespace {

using test::Fault;
using test::random_input;
using test::Swarm;

/// Beginnings of spans by their call's id.
std::map<std::string, std::vector<nlohmann::json>> spans_of(const std::filesystem::path& file) {
  std::ifstream stream(file);
  const auto events = nlohmann::json::parse(std::string(std::istreambuf_iterator<char>(stream), {}));
  std::map<std::string, std::vector<nlohmann::json>> spans;
  std::map<std::string, int> open;
  for (const auto& event : events) {
    if (event["ph"] == "M") continue;
    const auto id = event["id2"]["global"].get<std::string>();
    open[id + event["name"].get<std::string>()] += event["ph"] == "b" ? 1 : -1;
    if (event["ph"] == "b") spans[id].push_back(event);
  }
  for (const auto& [span, left] : open) CHECK(left == 0);
  return spans;
}

std::set<std::string> names_of(const std::vector<nlohmann::json>& spans) {
  std::set<std::string> names;
  for (const auto& span : spans) names.insert(span["name"].get<std::string>());
  return names;
}

TEST_CASE("a trainer's and a server's trace are joined by the calls' ids", "[dmoe][trace][e2e]") {
  const test::TemporaryFolder folder;
  const auto of_client = folder.path() / "trainer.json";
  const auto of_server = folder.path() / "server.json";
  {
    expert_server::ServerOptions options;
    options.listen = {"127.0.0.1", 0};
    options.expert_pattern = "ffn.0.[0:3]";
    options.expert.hidden_dim = 8;
    options.compute_threads = 1;
    options.trace_file = of_server;
    const auto server = expert_server::Server::start(std::move(options));
    REQUIRE(server.has_value());
    const auto client = Client::connect(
        ClientOptions().initial_peers({"127.0.0.1:" + std::to_string((*server)->port())}).trace_file(of_client));
    DMoE layer(client, DMoEOptions(8, {1, 3}, "ffn").k_best(3));
    layer->forward(torch::randn({5, 8})).sum().backward();
    RemoteExpert expert(client, "ffn.0.1");
    (void)expert->forward(torch::randn({2, 8}));
  }
  const auto calls = spans_of(of_client);
  const auto served = spans_of(of_server);
  REQUIRE(calls.size() == 7);
  for (const auto& [id, spans] : calls) {
    REQUIRE(spans.size() == 1);
    const auto& call = spans.front();
    const auto name = call["name"].get<std::string>();
    const auto uid = name.substr(name.find(' ') + 1);
    CHECK(call["args"]["outcome"] == "answered");
    CHECK((call["args"]["rows"] == "5" || call["args"]["rows"] == "2"));
    REQUIRE(served.count(id) == 1);
    CHECK(names_of(served.at(id)) == std::set<std::string>{"queue " + uid, "device " + uid, "reply " + uid});
    for (const auto& span : served.at(id)) CHECK(span["args"]["rows in batch"] == call["args"]["rows"]);
  }
}

TEST_CASE("a trace tells calls that failed and calls that were given up", "[dmoe][trace]") {
  const test::TemporaryFolder folder;
  const auto file = folder.path() / "trainer.json";
  Swarm swarm(3, {3}, 4);
  {
    const auto client = Client::with_resolver(std::shared_ptr<dht::PrefixResolver>(&swarm.directory(), [](auto*) {}),
                                              ClientOptions().trace_file(file));
    DMoE layer(client, swarm.options().timeout_after_k_min(std::chrono::milliseconds(100)));
    layer->to(torch::kDouble);
    swarm.host(1).set_fault(Fault::kError, Fault::kNone);
    swarm.host(2).set_fault(Fault::kSilent, Fault::kNone);
    (void)layer->forward(random_input(2, 4));
  }
  std::map<std::string, std::string> outcomes;
  for (const auto& [id, spans] : spans_of(file)) {
    for (const auto& span : spans) outcomes[span["name"]] = span["args"]["outcome"];
  }
  CHECK(outcomes["forward ffn.0"] == "answered");
  CHECK(outcomes["forward ffn.1"].find("this expert is broken") != std::string::npos);
  CHECK(outcomes["forward ffn.2"] == "given up");
}

TEST_CASE("a client whose trace cannot be written is refused", "[dmoe][trace]") {
  const test::TemporaryFolder folder;
  Swarm swarm(1, {1}, 4);
  const auto resolver = std::shared_ptr<dht::PrefixResolver>(&swarm.directory(), [](auto*) {});
  CHECK_THROWS_AS(Client::with_resolver(resolver, ClientOptions().trace_file(folder.path() / "none" / "trace.json")),
                  Exception);
}

}  // namespace
}  // namespace dmoe
