// `dmoe dht run`: a DHT node without experts, the meeting point of a network.
#include "cli/announced_address.hpp"
#include "cli/command.hpp"
#include "cli/data_directory.hpp"
#include "cli/dht_node.hpp"
#include "cli/options.hpp"
#include "cli/ready_line.hpp"
#include "cli/startup_report.hpp"
#include "cli/stop_signals.hpp"

#include "dht/service.hpp"
#include "net/identity.hpp"

#include <spdlog/spdlog.h>
#include <CLI/CLI.hpp>

#include <condition_variable>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>

namespace dmoe::cli {
namespace {

struct DhtRunOptions {
  std::string listen = "127.0.0.1:4040";
  std::vector<std::string> announce;
  std::vector<std::string> initial_peers;
  bool allow_alone = false;
  double join_timeout = 10;
  std::string data_dir;
  std::string identity;
  int ready_fd = -1;
};

/// Waits for the first contact with the network, or for the signal to stop.
Result<void> join(dht::Service& service, StopSignals& signals) {
  struct Waiting {
    std::mutex mutex;
    std::condition_variable changed;
    std::optional<Result<void>> result;
  };
  const auto waiting = std::make_shared<Waiting>();
  const auto finish = [waiting](Result<void> result) {
    const std::lock_guard lock(waiting->mutex);
    if (!waiting->result) waiting->result = std::move(result);
    waiting->changed.notify_all();
  };
  signals.on_stop([finish] { finish(Error{Errc::kCancelled, "interrupted", {}}); });
  service.join(finish);
  std::unique_lock lock(waiting->mutex);
  waiting->changed.wait(lock, [&] { return waiting->result.has_value(); });
  const Result<void> result = *waiting->result;
  lock.unlock();
  signals.on_stop({});
  return result;
}

Result<dht::ServiceOptions> to_service_options(const DhtRunOptions& options) {
  dht::ServiceOptions service;
  const auto listen = net::parse_endpoint(options.listen);
  if (!listen) return listen.error();
  const auto data_dir = data_directory(options.data_dir, "dht");
  if (!data_dir) return data_dir.error();
  service.listen = *listen;
  service.initial_peers = to_endpoints(options.initial_peers);
  service.data_dir = *data_dir;
  service.join_timeout = to_milliseconds(options.join_timeout);
  return service;
}

Result<std::filesystem::path> identity_file(const DhtRunOptions& options, const std::filesystem::path& data_dir) {
  std::error_code error;
  if (!options.identity.empty()) {
    const auto file = std::filesystem::absolute(options.identity, error);
    if (error) return Error{Errc::kInvalidArgument, "--identity '" + options.identity + "': " + error.message(), {}};
    return file;
  }
  std::filesystem::create_directories(data_dir, error);
  if (error) {
    return Error{Errc::kUnavailable, "cannot make --data-dir " + data_dir.string() + ": " + error.message(), {}};
  }
  return data_dir / "identity.pem";
}

Outcome run_node(const DhtRunOptions& options) {
  auto service_options = to_service_options(options);
  if (!service_options) return wrong_use(service_options.error().message);
  auto announce = addresses_to_announce(service_options->listen, to_endpoints(options.announce));
  if (!announce) return wrong_use(announce.error().message);
  StopSignals signals;
  const auto key_file = identity_file(options, *service_options->data_dir);
  if (!key_file) return failed("cannot keep a key", key_file.error());
  const auto identity = net::Identity::load_or_create(*key_file);
  if (!identity) return failed("cannot use the key", identity.error());

  auto node = DhtNode::start(*identity, *service_options);
  if (!node) return failed("cannot start the DHT node", node.error());
  if (const auto joined = join((*node)->service(), signals); !joined) {
    if (signals.requested()) return done();
    if (!options.allow_alone) {
      return failed("cannot join the network (to start anyway, and keep trying, add --allow-alone)", joined.error());
    }
    spdlog::warn("alone for now, and trying again: {}", joined.error().message);
  }
  ReadyLine line;
  line.peer_id = net::to_string(identity->peer_id());
  line.identity = key_file->string();
  line.listen = {service_options->listen.host, (*node)->port()};
  for (net::Endpoint& endpoint : *announce) {
    if (endpoint.port == 0) endpoint.port = line.listen.port;
  }
  line.announced = *announce;
  (*node)->set_ready();
  std::fputs(startup_report(line, "dmoe serve").c_str(), stdout);
  std::fflush(stdout);
  if (const auto reported = report_ready(options.ready_fd, line); !reported) {
    return wrong_use(reported.error().message);
  }
  signals.wait();
  (*node)->stop();
  return done();
}

void add_run_options(CLI::App& command, DhtRunOptions& options) {
  command
      .add_option("--listen", options.listen,
                  "Address to bind, UDP for the DHT and TCP for /healthz and /metrics; port 0: any free one. The "
                  "default serves this machine only; 0.0.0.0:PORT with "
                  "--announce serves others")
      ->type_name("HOST:PORT")
      ->capture_default_str()
      ->check(endpoint_text());
  command
      .add_option("--announce", options.announce,
                  "Address at which others reach this node, for the printed join line; default: what --listen says")
      ->type_name("HOST:PORT ...")
      ->delimiter(',')
      ->check(endpoint_text());
  add_initial_peers(command, options.initial_peers);
  command.add_flag("--allow-alone", options.allow_alone,
                   "Run although no initial peer answers, and keep trying to reach one");
  command.add_option("--join-timeout", options.join_timeout, "How long to wait for an initial peer, in seconds")
      ->type_name("SECONDS")
      ->capture_default_str()
      ->check(decimal_number(0.05, 3'600, "10"));
  command.add_option("--data-dir", options.data_dir, "Directory of key and records; default: ~/.local/share/dmoe/dht")
      ->type_name("DIR");
  command.add_option("--identity", options.identity, "Key file, made if missing; default: identity.pem in --data-dir")
      ->type_name("FILE");
  command
      .add_option("--ready-fd", options.ready_fd,
                  "For supervisors: write one JSON line to this descriptor once the node is up")
      ->type_name("NUMBER")
      ->check(whole_number(1, 1'000'000, "3"));
}

}  // namespace

void add_dht_command(CLI::App& app, Selection& selection) {
  auto options = std::make_shared<DhtRunOptions>();
  constexpr const char* kExample = "Example: dmoe dht run --listen 0.0.0.0:4040 --announce 203.0.113.5:4040";
  CLI::App* dht = app.add_subcommand("dht", "Run a DHT node without experts: a stable address for others to join at");
  CLI::App* run = dht->add_subcommand("run", "Run the node until it is told to stop (also without the word 'run')");
  const auto select = [options, &selection] {
    selection.command = "dht run";
    selection.run = [options] { return run_node(*options); };
  };
  for (CLI::App* command : {dht, run}) {  // The same variables: both spellings do the same.
    add_run_options(*command, *options);
    command->footer(kExample);
    command->callback(select);
  }
}

}  // namespace dmoe::cli
