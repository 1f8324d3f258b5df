// `dmoe dht run`: a DHT node without experts, the meeting point of a network.
#include "cli/announced_address.hpp"
#include "cli/dht_node.hpp"
#include "cli/dht_subcommands.hpp"
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

constexpr const char* kDhtPurpose = "dht";

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

dht::ServiceOptions service_options(const NetworkSettings& settings) {
  dht::ServiceOptions service;
  service.listen = settings.listen;
  service.initial_peers = settings.initial_peers;
  service.data_dir = settings.data_dir;
  service.join_timeout = settings.join_timeout;
  return service;
}

Result<net::Identity> own_identity(const NetworkSettings& settings) {
  std::error_code error;
  std::filesystem::create_directories(settings.data_dir, error);
  if (error) {
    return Error{Errc::kUnavailable,
                 "cannot make --data-dir '" + settings.data_dir.string() + "': " + error.message() +
                     "; name a directory that this user may write with --data-dir",
                 {}};
  }
  return net::Identity::load_or_create(settings.identity_file);
}

ReadyLine describe_node(const DhtNode& node, const net::Identity& identity, const NetworkSettings& settings) {
  ReadyLine line;
  line.peer_id = net::to_string(identity.peer_id());
  line.identity = settings.identity_file.string();
  line.listen = {settings.listen.host, node.port()};
  line.announced = settings.announce;
  for (net::Endpoint& endpoint : line.announced) {
    if (endpoint.port == 0) endpoint.port = line.listen.port;
  }
  return line;
}

Outcome run_node(const NetworkOptions& options) {
  const auto settings = to_settings(options, kDhtPurpose);
  if (!settings) return wrong_use(settings.error().message);
  StopSignals signals;
  if (const auto warning = reachability_warning(settings->announce, settings->initial_peers); !warning.empty()) {
    spdlog::warn("{}", warning);
  }
  const auto identity = own_identity(*settings);
  if (!identity) return failed("cannot start the DHT node", identity.error());
  auto node = DhtNode::start(*identity, service_options(*settings));
  if (!node) return failed("cannot start the DHT node", node.error());
  if (const auto joined = join((*node)->service(), signals); !joined) {
    if (signals.requested()) return done();
    if (!options.allow_alone) {
      Outcome outcome = failed("cannot join the network", joined.error());
      outcome.message += ", or start without them for now with --allow-alone";
      return outcome;
    }
    spdlog::warn("alone for now, and trying again: {}", joined.error().message);
  }
  const ReadyLine line = describe_node(**node, *identity, *settings);
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

/// An option that `dht run` has and `command` has not was taken for the node's, which does not run. One from the
/// configuration file's [dht] is for the node, and stays unsaid.
void refuse_options_of_run(const CLI::App& dht, const CLI::App& command, Selection& selection) {
  for (const CLI::Option* given : dht.parse_order()) {
    const std::string name = given->get_name();
    if (name == "--initial-peers") continue;
    selection.run = [name, command = command.get_name()] {
      return wrong_use(name + " is an option of 'dmoe dht run', and 'dmoe dht " + command +
                       "' runs no node; leave it out");
    };
    return;
  }
}

}  // namespace

void add_dht_run(CLI::App& dht, const std::shared_ptr<NetworkOptions>& network, Selection& selection) {
  CLI::App* run = dht.add_subcommand("run", "Run a node until it is told to stop (also without the word 'run')");
  for (CLI::App* command : {&dht, run}) {
    add_node_options(*command, *network);
    add_keeping_options(*command, *network, kDhtPurpose);
    add_ready_fd(*command, *network);
    command->footer("Example: dmoe dht run --listen 0.0.0.0:4040 --announce 203.0.113.5:4040");
    command->callback([network, &dht, run, &selection] {
      const auto chosen = dht.get_subcommands();
      if (!chosen.empty() && chosen.front() != run) {  // Called for `dht put` and the like, after theirs.
        refuse_options_of_run(dht, *chosen.front(), selection);
        return;
      }
      selection.command = "dht run";
      selection.run = [network] { return run_node(*network); };
    });
  }
}

}  // namespace dmoe::cli
