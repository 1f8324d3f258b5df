// How a command takes part in the network: these options have one declaration, whichever command offers them.
#pragma once

#include "net/endpoint.hpp"
#include "net/error.hpp"

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace dmoe::cli {

inline constexpr std::chrono::seconds kJoinTimeout{10};  ///< Names resolve and lost datagrams are sent again by then.
/// A live peer anywhere answers within it. Who may be alone starts without waiting longer, and joins later.
inline constexpr std::chrono::milliseconds kAloneTimeout{500};

/// As the command line gives them.
struct NetworkOptions {
  std::string listen = "127.0.0.1:0";
  std::vector<std::string> announce;
  std::vector<std::string> initial_peers;
  bool allow_alone = false;
  std::optional<double> join_timeout;  ///< Seconds. Unset: kJoinTimeout, or kAloneTimeout with allow_alone.
  std::string data_dir;
  std::string identity;
  int ready_fd = -1;
};

/// `--initial-peers`: `A B`, `A,B`, the flag repeated, or a list in the configuration file.
void add_initial_peers(CLI::App& command, std::vector<std::string>& peers);
/// `--initial-peers` and `--join-timeout`: for whoever joins.
void add_join_options(CLI::App& command, NetworkOptions& options);
/// The same with `--listen`, `--announce` and `--allow-alone`: for a node that others reach.
void add_node_options(CLI::App& command, NetworkOptions& options);
/// `--data-dir` and `--identity`: for a node that keeps something. `purpose` ends the default directory's path.
void add_keeping_options(CLI::App& command, NetworkOptions& options, const std::string& purpose);
/// `--ready-fd`: for a node that others start.
void add_ready_fd(CLI::App& command, NetworkOptions& options);

/// How long to wait for the first answer.
std::chrono::milliseconds join_timeout(const NetworkOptions& options);

/// What the options mean, checked together.
struct NetworkSettings {
  net::Endpoint listen;
  std::vector<net::Endpoint> announce;
  std::vector<net::Endpoint> initial_peers;
  std::chrono::milliseconds join_timeout{0};
  std::filesystem::path data_dir;       ///< Absolute; it need not exist.
  std::filesystem::path identity_file;  ///< Absolute; it need not exist.
};

/// kInvalidArgument: options that do not go together; the message names the flag and the fix.
Result<NetworkSettings> to_settings(const NetworkOptions& options, const std::string& purpose);

}  // namespace dmoe::cli
