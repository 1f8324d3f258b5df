#include "cli/network_options.hpp"

#include "cli/announced_address.hpp"
#include "cli/data_directory.hpp"
#include "cli/options.hpp"
#include "cli/ready_line.hpp"

namespace dmoe::cli {
namespace {

void add_addresses(CLI::App& command, NetworkOptions& options) {
  command
      .add_option("--listen", options.listen,
                  "Address to bind, TCP and UDP; port 0: any free one. A loopback address serves this machine only; "
                  "0.0.0.0:PORT with --announce serves others")
      ->type_name("HOST:PORT")
      ->capture_default_str()
      ->check(endpoint_text());
  command
      .add_option("--announce", options.announce,
                  "Address at which others reach this node (port 0: the bound one); default: what --listen says")
      ->type_name("HOST:PORT ...")
      ->delimiter(',')
      ->check(endpoint_text());
}

void add_join_timeout(CLI::App& command, NetworkOptions& options, const char* about) {
  command.add_option("--join-timeout", options.join_timeout, about)
      ->type_name("SECONDS")
      ->check(decimal_number(0.05, 3'600, "10"));
}

}  // namespace

void add_initial_peers(CLI::App& command, std::vector<std::string>& peers) {
  command
      .add_option("--initial-peers", peers,
                  "Addresses of nodes that are already in the network; one that answers is enough. Several: 'A B', "
                  "'A,B' or the option repeated")
      ->type_name("HOST:PORT ...")
      ->delimiter(',')
      ->check(endpoint_text());
}

void add_join_options(CLI::App& command, NetworkOptions& options) {
  add_initial_peers(command, options.initial_peers);
  add_join_timeout(command, options, "How long to wait for an initial peer, in seconds; default: 10");
}

void add_node_options(CLI::App& command, NetworkOptions& options) {
  add_addresses(command, options);
  add_initial_peers(command, options.initial_peers);
  command.add_flag("--allow-alone", options.allow_alone,
                   "Start although no initial peer answers, and keep trying to reach one");
  add_join_timeout(command, options,
                   "How long to wait for an initial peer, in seconds; default: 10, or 0.5 with --allow-alone");
}

void add_keeping_options(CLI::App& command, NetworkOptions& options, const std::string& purpose) {
  command
      .add_option("--data-dir", options.data_dir,
                  "Directory of what is kept: key, DHT records, an expert server's checkpoints; default: "
                  "~/.local/share/dmoe/" +
                      purpose)
      ->type_name("DIR");
  command.add_option("--identity", options.identity, "Key file, made if missing; default: identity.pem in --data-dir")
      ->type_name("FILE");
}

void add_ready_fd(CLI::App& command, NetworkOptions& options) {
  command
      .add_option("--ready-fd", options.ready_fd,
                  "For supervisors: write one JSON line to this descriptor once the node is up and, with experts, has "
                  "announced them")
      ->type_name("NUMBER")
      ->check(whole_number(1, 1'000'000, "3"));
}

std::chrono::milliseconds join_timeout(const NetworkOptions& options) {
  if (options.join_timeout) return to_milliseconds(*options.join_timeout);
  return options.allow_alone ? kAloneTimeout : std::chrono::milliseconds{kJoinTimeout};
}

Result<NetworkSettings> to_settings(const NetworkOptions& options, const std::string& purpose) {
  NetworkSettings settings;
  const auto listen = net::parse_endpoint(options.listen);
  if (!listen) return listen.error();
  if (!is_ip_address(*listen)) {
    return Error{
        Errc::kInvalidArgument,
        "--listen " + options.listen + ": '" + listen->host +
            "' is a name; give an IP address of this machine, for example 127.0.0.1:4040, or 0.0.0.0:4040 with "
            "--announce",
        {}};
  }
  if (const auto open = check_ready_fd(options.ready_fd); !open) return open.error();
  auto announce = addresses_to_announce(*listen, to_endpoints(options.announce));
  if (!announce) return announce.error();
  const auto data_dir = data_directory(options.data_dir, purpose);
  if (!data_dir) return data_dir.error();
  settings.identity_file = *data_dir / "identity.pem";
  if (!options.identity.empty()) {
    std::error_code error;
    settings.identity_file = std::filesystem::absolute(options.identity, error);
    if (error) return Error{Errc::kInvalidArgument, "--identity '" + options.identity + "': " + error.message(), {}};
  }
  settings.listen = *listen;
  settings.announce = *std::move(announce);
  settings.initial_peers = to_endpoints(options.initial_peers);
  settings.join_timeout = join_timeout(options);
  settings.data_dir = *data_dir;
  return settings;
}

}  // namespace dmoe::cli
