// One file per command: each adds itself to the command line and leaves behind what is to be run.
#pragma once

#include "cli/outcome.hpp"

#include <functional>
#include <string>

namespace CLI {
class App;
}

namespace dmoe::cli {

/// What the command line chose. `run` is set by the chosen command once all of its options are checked.
struct Selection {
  std::string command;           ///< "serve", "dht run", …: the prefix of messages.
  std::function<Outcome()> run;  ///< Empty while no command was chosen.
};

void add_serve_command(CLI::App& app, Selection& selection);
void add_dht_command(CLI::App& app, Selection& selection);
void add_experts_command(CLI::App& app, Selection& selection);
void add_train_command(CLI::App& app, Selection& selection);
void add_demo_command(CLI::App& app, Selection& selection);
void add_checkpoint_command(CLI::App& app, Selection& selection);
void add_keygen_command(CLI::App& app, Selection& selection);

}  // namespace dmoe::cli
