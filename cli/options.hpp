// Checks of option values. Each message says what was given, what is wanted and an example: CLI11 puts the flag before.
#pragma once

#include "net/endpoint.hpp"
#include "net/error.hpp"

#include <CLI/CLI.hpp>

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace dmoe::cli {

/// A whole number from `least` to `most`.
CLI::Validator whole_number(std::int64_t least, std::int64_t most, std::string example);

/// A finite decimal number from `least` to `most`.
CLI::Validator decimal_number(double least, double most, std::string example);

/// One of these words.
CLI::Validator one_of(std::vector<std::string> words);

/// At most `most` bytes.
CLI::Validator short_text(std::size_t most, std::string example);

/// 1 to `most` lower-case hexadecimal digits.
CLI::Validator hexadecimal(std::size_t most, std::string example);

/// host:port, as net::parse_endpoint reads it.
CLI::Validator endpoint_text();

/// A duration as parse_duration reads it, from `least` to `most`.
CLI::Validator duration(std::chrono::milliseconds least, std::chrono::milliseconds most, std::string example);

/// "90s", "15m", "1.5h", "1d"; without a unit: seconds. kInvalidArgument with examples.
Result<std::chrono::milliseconds> parse_duration(std::string_view text);

/// The two largest units of it: "1h", "59m 58s", "0s".
std::string duration_text(std::chrono::milliseconds duration);

/// Endpoints that `endpoint_text` has already accepted.
std::vector<net::Endpoint> to_endpoints(const std::vector<std::string>& texts);

/// "1.5" seconds, as an option gives them, in milliseconds.
std::chrono::milliseconds to_milliseconds(double seconds);

}  // namespace dmoe::cli
