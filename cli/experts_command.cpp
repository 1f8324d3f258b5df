// `dmoe experts`: who is alive, and where.
#include "cli/command.hpp"
#include "cli/expert_probe.hpp"
#include "cli/network_options.hpp"
#include "cli/options.hpp"

#include "dmoe/client.hpp"

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>
#include <memory>

namespace dmoe::cli {
namespace {

struct ExpertsOptions {
  std::string grid = "ffn";
  std::size_t dimensions = 2;
  std::vector<std::string> initial_peers;
  double timeout = 10;
  bool check = false;
  bool json = false;
};

/// "ffn" or "ffn.3." as a prefix.
Result<ExpertPrefix> read_prefix(const std::string& text) {
  if (is_grid_name(text)) return ExpertPrefix{text, {}};
  return parse_expert_prefix(text);
}

CLI::Validator grid_or_prefix() {
  return {[](std::string& text) -> std::string {
            const auto prefix = read_prefix(text);
            return prefix ? std::string{} : prefix.error().message + " (or a grid's name, for example ffn)";
          },
          "", ""};
}

bool lies_below(const ExpertUid& uid, const ExpertPrefix& prefix) {
  return uid.coordinates.size() > prefix.coordinates.size() &&
         std::equal(prefix.coordinates.begin(), prefix.coordinates.end(), uid.coordinates.begin());
}

nlohmann::ordered_json to_json(const ExpertMap& experts, const std::set<ExpertUid>* answering) {
  auto list = nlohmann::ordered_json::array();
  for (const auto& [uid, servers] : experts) {
    nlohmann::ordered_json entry{{"uid", to_string(uid)}, {"servers", nlohmann::ordered_json::array()}};
    for (const auto& server : servers) {
      nlohmann::ordered_json endpoints = nlohmann::ordered_json::array();
      for (const net::Endpoint& endpoint : server->endpoints) endpoints.push_back(net::to_string(endpoint));
      entry["servers"].push_back({{"peer_id", net::to_string(server->peer)}, {"endpoints", endpoints}});
    }
    if (answering != nullptr) entry["answers"] = answering->contains(uid);
    list.push_back(std::move(entry));
  }
  return {{"experts", std::move(list)}};
}

void print_lines(const ExpertMap& experts, const std::set<ExpertUid>* answering) {
  for (const auto& [uid, servers] : experts) {
    std::string line = to_string(uid);
    for (const auto& server : servers) {
      line += "  " + net::to_string(server->endpoints.front()) + " (" + net::short_string(server->peer) + ")";
    }
    if (answering != nullptr) line += answering->contains(uid) ? "  answers" : "  silent";
    std::puts(line.c_str());
  }
}

Outcome list_experts(const ExpertsOptions& options) {
  const auto prefix = read_prefix(options.grid);
  if (!prefix) return wrong_use("GRID: " + prefix.error().message);
  if (prefix->coordinates.size() >= options.dimensions) {
    return wrong_use("--dimensions " + std::to_string(options.dimensions) + " is too few for experts below " +
                     to_string(*prefix) + "; give the number of coordinates of a full UID");
  }
  auto client = Client::try_connect(ClientOptions()
                                        .initial_endpoints(to_endpoints(options.initial_peers))
                                        .join_timeout(to_milliseconds(options.timeout)));
  if (!client) return failed("cannot reach the network", client.error());
  ExpertMap experts;
  try {
    experts = (*client)->list_experts(prefix->grid, options.dimensions, to_milliseconds(options.timeout));
  } catch (const Exception& error) {
    return failed("cannot list the experts", error.error());
  }
  std::erase_if(experts, [&](const auto& entry) { return !lies_below(entry.first, *prefix); });
  std::set<ExpertUid> answering;
  if (options.check) answering = answering_experts(**client, experts, to_milliseconds(options.timeout));
  const auto* known = options.check ? &answering : nullptr;
  if (options.json) {
    std::puts(to_json(experts, known).dump().c_str());
  } else if (experts.empty()) {
    std::printf("no live experts below %s with %zu dimensions\n", to_string(*prefix).c_str(), options.dimensions);
  } else {
    print_lines(experts, known);
  }
  return done();
}

}  // namespace

void add_experts_command(CLI::App& app, Selection& selection) {
  auto options = std::make_shared<ExpertsOptions>();
  CLI::App* command = app.add_subcommand("experts", "List the live experts of a grid and the servers that host them");
  command->add_option("grid,--grid", options->grid, "Name of the grid (ffn), or a prefix with its final dot (ffn.3.)")
      ->type_name("GRID")
      ->capture_default_str()
      ->check(grid_or_prefix());
  command->add_option("--dimensions", options->dimensions, "Coordinates of a full UID: 2 for ffn.3.17")
      ->type_name("COUNT")
      ->capture_default_str()
      ->check(whole_number(1, kMaxGridDimensions, "2"));
  add_initial_peers(*command, options->initial_peers);
  command->get_option("--initial-peers")->required();
  command->add_option("--timeout", options->timeout, "How long to wait for the network, in seconds")
      ->type_name("SECONDS")
      ->capture_default_str()
      ->check(decimal_number(0.05, 3'600, "10"));
  command->add_flag("--check", options->check, "Also ask every expert whether it answers");
  command->add_flag("--json", options->json, "Print one JSON object");
  command->footer("Example: dmoe experts ffn --dimensions 2 --initial-peers 203.0.113.5:4040");
  command->callback([options, &selection] {
    selection.command = "experts";
    selection.run = [options] { return list_experts(*options); };
  });
}

}  // namespace dmoe::cli
