// The commands under `dmoe dht`. One file per subject adds them.
#pragma once

#include "cli/command.hpp"
#include "cli/network_options.hpp"

#include <memory>

namespace dmoe::cli {

/// `dht run`, and `dht` without a further word: the same options, in the same variables.
void add_dht_run(CLI::App& dht, const std::shared_ptr<NetworkOptions>& network, Selection& selection);
/// `dht put` and `dht get`. They join through `network`'s initial peers, whether given before or after the word.
void add_dht_records(CLI::App& dht, const std::shared_ptr<NetworkOptions>& network, Selection& selection);
/// `dht ping` and `dht stats`: questions to one node.
void add_dht_questions(CLI::App& dht, Selection& selection);

}  // namespace dmoe::cli
