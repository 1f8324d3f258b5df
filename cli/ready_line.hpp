// What a started server tells whoever started it: one JSON line on a descriptor of its choice.
#pragma once

#include "net/endpoint.hpp"
#include "net/error.hpp"

#include <string>
#include <string_view>
#include <vector>

namespace dmoe::cli {

/// A server that is up: reachable, and with its experts announced.
struct ReadyLine {
  std::string peer_id;
  std::string identity;                  ///< Absolute path of the key file; empty: the key is not kept.
  net::Endpoint listen;                  ///< As bound: the port is never 0.
  std::vector<net::Endpoint> announced;  ///< Where others reach it.
  std::vector<std::string> experts;      ///< UIDs; empty for a DHT node.
};

/// One line of JSON, without the newline: peer_id, identity, listen, announced, experts.
std::string to_json(const ReadyLine& line);
/// Reads what to_json wrote. kInvalidArgument names what is missing.
Result<ReadyLine> parse_ready_line(std::string_view text);

/// Before a start: whether report_ready can write to it. kInvalidArgument: not open for writing.
Result<void> check_ready_fd(int descriptor);

/// Writes the line and closes `descriptor` (`--ready-fd`); nothing when it is negative.
/// kInvalidArgument: the descriptor is not open for writing.
Result<void> report_ready(int descriptor, const ReadyLine& line);

}  // namespace dmoe::cli
