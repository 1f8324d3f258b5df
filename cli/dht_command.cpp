// `dmoe dht`: the DHT by itself.
#include "cli/dht_subcommands.hpp"

#include <CLI/CLI.hpp>

namespace dmoe::cli {

void add_dht_command(CLI::App& app, Selection& selection) {
  CLI::App* dht =
      app.add_subcommand("dht", "Run a DHT node without experts (a stable address for others to join at), or use one");
  const auto network = std::make_shared<NetworkOptions>();
  network->listen = "127.0.0.1:4040";
  add_dht_run(*dht, network, selection);
  add_dht_records(*dht, network, selection);
  add_dht_questions(*dht, selection);
}

}  // namespace dmoe::cli
