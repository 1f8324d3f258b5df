// `dmoe serve`: hosts experts until it is told to stop.
#include "cli/announced_address.hpp"
#include "cli/command.hpp"
#include "cli/matrix_speed.hpp"
#include "cli/process_setup.hpp"
#include "cli/ready_line.hpp"
#include "cli/serve_options.hpp"
#include "cli/startup_report.hpp"
#include "cli/stop_signals.hpp"

#include <spdlog/spdlog.h>
#include <CLI/CLI.hpp>

#include <cstdio>
#include <memory>
#include <stop_token>

namespace dmoe::cli {
namespace {

ReadyLine describe_server(const expert_server::Server& server, const expert_server::ServerOptions& options) {
  ReadyLine line;
  line.peer_id = net::to_string(server.peer_id());
  line.identity = options.identity_file->string();
  line.listen = {options.listen.host, server.port()};
  line.announced = server.announced();
  for (const ExpertUid& uid : server.experts()) line.experts.push_back(to_string(uid));
  return line;
}

/// What another machine runs to host more of the same grid.
std::string join_command(const ServeOptions& options) {
  // Where experts are claimed at random, there are others to claim.
  std::string text =
      "dmoe serve " + shell_word(options.num_experts > 0 ? options.pattern : pattern_beside(options.pattern));
  if (options.num_experts > 0) text += " --num-experts " + std::to_string(options.num_experts);
  text += options.expert_script.empty() ? " --expert " + options.expert.architecture
                                        : " --expert-script " + shell_word(options.expert_script);
  text += " --hidden-dim " + std::to_string(options.expert.hidden_dim);
  for (const std::string& argument : options.expert_arguments) text += " --expert-arg " + shell_word(argument);
  return text;
}

void warn_of_few_files() {
  if (const auto files = raise_file_limit(); files < kFewFiles) {
    spdlog::warn("at most {} files and sockets may be open, so callers may be refused; raise it with 'ulimit -n {}'",
                 files, kFewFiles * 4);
  }
}

Outcome explain(const Error& error, const ServeOptions& options) {
  Outcome outcome = failed("cannot serve", error);
  if (error.code == Errc::kUnavailable && error.message.find("initial peer") != std::string::npos &&
      !options.network.allow_alone) {
    outcome.message += ", or start without them for now with --allow-alone";
  }
  return outcome;
}

Outcome serve(const ServeOptions& options) {
  auto server_options = to_server_options(options);
  if (!server_options) return wrong_use(server_options.error().message);
  StopSignals signals;
  std::stop_source abort;
  signals.on_stop([abort]() mutable { abort.request_stop(); });  // A copy: shares the state.
  warn_of_few_files();
  warn_of_slow_matrices();
  if (const auto warning = reachability_warning(server_options->announce, server_options->initial_peers);
      !warning.empty()) {
    spdlog::warn("{}", warning);
  }
  auto server = expert_server::Server::start(*server_options, abort.get_token());
  if (!server) {
    if (signals.requested()) return done();  // Told to stop before it was up: nothing to undo.
    return explain(server.error(), options);
  }
  const ReadyLine line = describe_server(**server, *server_options);
  std::fputs(startup_report(line, join_command(options)).c_str(), stdout);
  std::fflush(stdout);
  if (const auto reported = report_ready(options.network.ready_fd, line); !reported) {
    return wrong_use(reported.error().message);
  }
  signals.wait();
  spdlog::info("signal {}: telling the network, finishing queued calls, writing checkpoints; again to end at once",
               signals.signal());
  (*server)->stop();
  return done();
}

}  // namespace

void add_serve_command(CLI::App& app, Selection& selection) {
  auto options = std::make_shared<ServeOptions>();
  CLI::App* command = app.add_subcommand("serve", "Host experts: announce them in the DHT and answer trainers' calls");
  add_serve_options(*command, *options);
  command->footer(
      "Example, first machine:   dmoe serve 'ffn.[0:4].[0:4]' --hidden-dim 512 --listen 0.0.0.0:4040 "
      "--announce 203.0.113.5:4040\n"
      "Example, second machine:  dmoe serve 'ffn.[4:8].[0:4]' --hidden-dim 512 --listen 0.0.0.0:4040 "
      "--announce 203.0.113.6:4040 --initial-peers 203.0.113.5:4040");
  command->callback([options, &selection] {
    selection.command = "serve";
    selection.run = [options] { return serve(*options); };
  });
}

}  // namespace dmoe::cli
