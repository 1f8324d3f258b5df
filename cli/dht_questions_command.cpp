// `dmoe dht ping` and `dmoe dht stats`: is that node there, and how is it?
#include "cli/dht_client.hpp"
#include "cli/dht_subcommands.hpp"
#include "cli/http_get.hpp"
#include "cli/options.hpp"
#include "cli/progress.hpp"
#include "cli/record_text.hpp"

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace dmoe::cli {
namespace {

struct QuestionOptions {
  std::string node;
  double timeout = 5;
  bool json = false;
};

double milliseconds(dht::Duration duration) { return std::chrono::duration<double, std::milli>(duration).count(); }

Result<dht::PingReport> ping_node(DhtClient& client, const net::Endpoint& node) {
  const auto addresses = resolve(node);
  if (!addresses) return addresses.error();
  return client.ping(*addresses);
}

std::string nobody_there(const QuestionOptions& options) {
  return "; check the address, that the node runs ('dmoe dht run' or 'dmoe serve'), and that no firewall stops UDP to "
         "it (waited " +
         duration_text(to_milliseconds(options.timeout)) + ")";
}

Outcome ping(const QuestionOptions& options) {
  const auto node = net::parse_endpoint(options.node);
  if (!node) return wrong_use("NODE: " + node.error().message);
  const auto client = DhtClient::start(net::Identity::generate(), {}, to_milliseconds(options.timeout));
  if (!client) return failed("cannot open a socket", client.error());
  const auto answer = ping_node(**client, *node);
  if (!answer) return failed(answer.error().message + nobody_there(options));
  const std::string observed = answer->observed ? to_string(*answer->observed) : "";
  if (options.json) {
    const nlohmann::ordered_json json{
        {"node", options.node},
        {"peer_id", net::to_string(answer->id)},
        {"round_trip_ms", milliseconds(answer->round_trip)},
        {"observed", observed.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(observed)}};
    std::puts(json_line(json).c_str());
    return done();
  }
  Table table;
  table.row("node", options.node);
  table.row("peer id", net::to_string(answer->id));
  table.row("round trip", rounded(milliseconds(answer->round_trip), 2) + " ms");
  table.row("it sees us at", observed.empty() ? "it does not say" : observed);
  table.print(stdout);
  return done();
}

/// What is known of a node; unset: n/a.
struct NodeFacts {
  bool told_by_node = false;
  std::string peer_id;
  std::optional<std::uint64_t> nodes_known;
  std::optional<std::uint64_t> records_held;
  std::optional<std::uint64_t> datagrams_sent;
  std::optional<std::uint64_t> datagrams_received;
  std::optional<std::uint64_t> datagrams_refused;
};

/// What `dmoe dht run` and `dmoe serve` tell at /api/v1/dht; nothing when the answer is another program's.
std::optional<NodeFacts> own_facts(const QuestionOptions& options, const net::Endpoint& node) {
  const auto answer = http_get(node, "/api/v1/dht", to_milliseconds(options.timeout));
  if (!answer || answer->status != 200) return std::nullopt;
  try {
    const auto json = nlohmann::json::parse(answer->body);
    const auto number = [&](const char* name) { return json.at(name).get<std::uint64_t>(); };
    return NodeFacts{true,
                     json.at("peer_id").get<std::string>(),
                     number("nodes_known"),
                     number("records_held"),
                     number("datagrams_sent"),
                     number("datagrams_received"),
                     number("datagrams_refused")};
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
}

/// What a client learns that joins through the node: where nobody answers at /api/v1/dht.
Result<NodeFacts> seen_from_outside(const QuestionOptions& options, const net::Endpoint& node) {
  auto client = DhtClient::start(net::Identity::generate(), {node}, to_milliseconds(options.timeout));
  if (!client) return client.error();
  const auto answer = ping_node(**client, node);
  if (!answer) return answer.error();
  if (const auto joined = (*client)->join(); !joined) return joined.error();
  (void)(*client)->count_nearest();  // Once it ends, the client has met whom it can meet.
  NodeFacts facts;
  facts.peer_id = net::to_string(answer->id);
  facts.nodes_known = (*client)->stats().known_nodes;
  return facts;
}

/// Rows of the table, and keys of the JSON object.
std::vector<std::pair<const char*, std::optional<std::uint64_t>>> numbers_of(const NodeFacts& facts) {
  return {{"nodes_known", facts.nodes_known},
          {"records_held", facts.records_held},
          {"datagrams_sent", facts.datagrams_sent},
          {"datagrams_received", facts.datagrams_received},
          {"datagrams_refused", facts.datagrams_refused}};
}

void print_json(const std::string& node, const NodeFacts& facts) {
  nlohmann::ordered_json json{
      {"node", node}, {"peer_id", facts.peer_id}, {"source", facts.told_by_node ? "node" : "client"}};
  for (const auto& [name, number] : numbers_of(facts)) {
    json[name] = number ? nlohmann::ordered_json(*number) : nlohmann::ordered_json();
  }
  std::puts(json_line(json).c_str());
}

void print_table(const std::string& node, const NodeFacts& facts) {
  Table table;
  table.row("node", node);
  table.row("peer id", facts.peer_id);
  table.row("seen", facts.told_by_node ? "by the node itself" : "by a client that joined through it");
  for (const auto& [name, number] : numbers_of(facts)) {
    std::string label = name;
    std::replace(label.begin(), label.end(), '_', ' ');
    table.row(label, number ? std::to_string(*number) : "n/a");
  }
  table.print(stdout);
}

Outcome stats(const QuestionOptions& options) {
  const auto node = net::parse_endpoint(options.node);
  if (!node) return wrong_use("NODE: " + node.error().message);
  std::optional<NodeFacts> facts = own_facts(options, *node);
  if (!facts) {
    auto seen = seen_from_outside(options, *node);
    if (!seen) return failed(seen.error().message + nobody_there(options));
    facts = *std::move(seen);
  }
  if (options.json) {
    print_json(options.node, *facts);
  } else {
    print_table(options.node, *facts);
  }
  return done();
}

void add_question(CLI::App& command, QuestionOptions& options) {
  command.add_option("--timeout", options.timeout, "How long to wait for an answer, in seconds")
      ->type_name("SECONDS")
      ->capture_default_str()
      ->check(decimal_number(0.05, 3'600, "5"));
  command.add_flag("--json", options.json, "Print one JSON object");
}

}  // namespace

void add_dht_questions(CLI::App& dht, Selection& selection) {
  auto asked = std::make_shared<QuestionOptions>();
  CLI::App* ping_command = dht.add_subcommand("ping", "Ask a node whether it is there, and at what address it sees us");
  ping_command->add_option("node,--node", asked->node, "Address of the node")
      ->type_name("HOST:PORT")
      ->required()
      ->check(endpoint_text());
  add_question(*ping_command, *asked);
  ping_command->footer("Example: dmoe dht ping 203.0.113.5:4040");
  ping_command->callback([asked, &selection] {
    selection.command = "dht ping";
    selection.run = [asked] { return ping(*asked); };
  });

  auto about = std::make_shared<QuestionOptions>();
  about->node = "127.0.0.1:4040";
  CLI::App* stats_command =
      dht.add_subcommand("stats", "Ask a running node how many nodes it knows and records it holds");
  stats_command->add_option("node,--node", about->node, "Address of the node")
      ->type_name("HOST:PORT")
      ->capture_default_str()
      ->check(endpoint_text());
  add_question(*stats_command, *about);
  stats_command->footer(
      "Example: dmoe dht stats 203.0.113.5:4040 --json\n"
      "'dmoe dht run' and 'dmoe serve' tell this themselves (GET /api/v1/dht on the TCP port). Of any other node, and "
      "of "
      "one whose TCP port is closed, it is shown what a client sees that joins through it; what that cannot know is "
      "n/a "
      "(null).");
  stats_command->callback([about, &selection] {
    selection.command = "dht stats";
    selection.run = [about] { return stats(*about); };
  });
}

}  // namespace dmoe::cli
