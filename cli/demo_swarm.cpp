#include "cli/demo_swarm.hpp"

#include <csignal>
#include <utility>

namespace dmoe::cli {
namespace {

constexpr std::size_t kLogLines = 12;                  ///< Shown of a failed process's log.
constexpr std::chrono::milliseconds kStopTime{5'000};  ///< For all processes to end by themselves.

std::vector<std::string> server_arguments(const SwarmOptions& options, std::int64_t index,
                                          const std::filesystem::path& directory, const net::Endpoint& dht) {
  const std::string pattern =
      "ffn." + std::to_string(index) + ".[0:" + std::to_string(options.experts_per_server) + "]";
  std::vector<std::string> arguments{"serve",
                                     "--pattern",
                                     pattern,
                                     "--expert",
                                     "ffn",
                                     "--hidden-dim",
                                     std::to_string(options.hidden_dim),
                                     "--learning-rate",
                                     std::to_string(options.learning_rate),
                                     "--listen",
                                     "127.0.0.1:0",
                                     "--initial-peers",
                                     net::to_string(dht),
                                     "--data-dir",
                                     directory.string(),
                                     "--checkpoint-period",
                                     "0",
                                     "--threads",
                                     "1",
                                     "--ready-fd",
                                     std::to_string(kReadyDescriptor)};
  if (options.seed != 0) {
    arguments.insert(arguments.end(), {"--seed", std::to_string(options.seed + static_cast<std::uint64_t>(index))});
  }
  return arguments;
}

}  // namespace

Result<void> DemoSwarm::spawn(const SwarmOptions& options, const std::string& name,
                              std::vector<std::string> arguments) {
  ChildOptions child;
  child.program = options.program;
  child.arguments = std::move(arguments);
  child.log_file = directory_.path() / (name + ".log");
  child.ready_pipe = true;
  // One core each: the processes share this machine, and BLAS threads that wait for each other would only spin.
  child.environment = {"OPENBLAS_NUM_THREADS=1", "OMP_NUM_THREADS=1"};
  auto spawned = ChildProcess::spawn(child);
  if (!spawned) return spawned.error();
  processes_.push_back({name, *std::move(spawned), false});
  return {};
}

Result<ReadyLine> DemoSwarm::wait_ready(Process& process, ChildProcess::Deadline deadline, StopSignals& signals) {
  const auto text = process.child.ready_line(deadline, signals.descriptor());
  if (text) return parse_ready_line(*text);
  if (text.error().code == Errc::kCancelled) return text.error();
  std::string message = process.name + " did not start";
  if (const auto status = process.child.wait(std::chrono::steady_clock::now() + std::chrono::milliseconds(200))) {
    message += " (" + describe(*status) + ")";
  } else {
    message += " in time";
  }
  return Error{
      text.error().code, message + "; the end of its log:\n" + tail_of(process.child.log_file(), kLogLines), {}};
}

Result<DemoSwarm> DemoSwarm::start(const SwarmOptions& options, StopSignals& signals) {
  auto directory = TemporaryDirectory::make("dmoe-demo");
  if (!directory) return directory.error();
  const auto deadline = std::chrono::steady_clock::now() + options.start_timeout;
  DemoSwarm swarm(*std::move(directory));
  if (auto spawned =
          swarm.spawn(options, "dht",
                      {"dht", "run", "--listen", "127.0.0.1:0", "--data-dir", (swarm.directory() / "dht").string(),
                       "--ready-fd", std::to_string(kReadyDescriptor)});
      !spawned) {
    return spawned.error();
  }
  const auto dht = swarm.wait_ready(swarm.processes_.front(), deadline, signals);
  if (!dht) return dht.error();
  swarm.initial_peers_ = dht->announced;
  for (std::int64_t i = 0; i < options.servers; ++i) {
    const std::string name = "server-" + std::to_string(i);
    auto spawned =
        swarm.spawn(options, name, server_arguments(options, i, swarm.directory() / name, dht->announced.front()));
    if (!spawned) return spawned.error();
  }
  for (std::size_t i = 1; i < swarm.processes_.size(); ++i) {
    if (const auto ready = swarm.wait_ready(swarm.processes_[i], deadline, signals); !ready) return ready.error();
  }
  return swarm;
}

void DemoSwarm::kill_server(std::size_t index) {
  Process& process = processes_.at(index + 1);
  process.killed = true;
  process.child.send(SIGKILL);
  (void)process.child.wait(std::chrono::steady_clock::now() + kStopTime);
}

std::optional<std::string> DemoSwarm::unexpected_end() {
  for (Process& process : processes_) {
    if (process.killed || process.child.running()) continue;
    return process.name + " ended by itself (" + describe(*process.child.wait(ChildProcess::Deadline::min())) +
           "); the end of its log:\n" + tail_of(process.child.log_file(), kLogLines);
  }
  return std::nullopt;
}

void DemoSwarm::stop() {
  const auto deadline = std::chrono::steady_clock::now() + kStopTime;
  for (Process& process : processes_) process.child.send(SIGTERM);
  for (Process& process : processes_) (void)process.child.stop(deadline);
}

}  // namespace dmoe::cli
