// Checks of option values. Each message says what was given, what is wanted and an example: CLI11 puts the flag before.
#pragma once

#include "net/endpoint.hpp"

#include <CLI/CLI.hpp>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace dmoe::cli {

/// A whole number from `least` to `most`.
CLI::Validator whole_number(std::int64_t least, std::int64_t most, std::string example);

/// A finite decimal number from `least` to `most`.
CLI::Validator decimal_number(double least, double most, std::string example);

/// One of these words.
CLI::Validator one_of(std::vector<std::string> words);

/// host:port, as net::parse_endpoint reads it.
CLI::Validator endpoint_text();

/// Adds `--initial-peers`: `A B`, `A,B`, the flag repeated, or a list in the configuration file.
void add_initial_peers(CLI::App& command, std::vector<std::string>& peers);

/// Endpoints that `endpoint_text` has already accepted.
std::vector<net::Endpoint> to_endpoints(const std::vector<std::string>& texts);

/// "1.5" seconds, as an option gives them, in milliseconds.
std::chrono::milliseconds to_milliseconds(double seconds);

}  // namespace dmoe::cli
