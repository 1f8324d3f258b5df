// dmoe-bench: every figure that docs/benchmarks.md quotes.
#include "bench/suite.hpp"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>
#include <CLI/CLI.hpp>

#include <csignal>
#include <iostream>
#include <sstream>

namespace {

using dmoe::bench::Options;
using dmoe::bench::Reporter;
using dmoe::bench::Suite;

struct Named {
  const char* name;
  const char* what;
  void (*run)(const Options&, Reporter&);
};

constexpr Named kSuites[] = {
#define DMOE_BENCH_SUITE(symbol, text, what) {text, what, &dmoe::bench::symbol##_suite},
#include "bench_suites.inc"
#undef DMOE_BENCH_SUITE
};

std::vector<std::int64_t> parse_grid(const std::string& text) {
  std::vector<std::int64_t> sizes;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) sizes.push_back(std::stoll(part));
  return sizes;
}

/// Empty when `text` is a grid such as "32,32", else what is wrong with it (as CLI11 wants it).
std::string check_grid(const std::string& text) {
  const bool digits = text.find_first_not_of("0123456789,") == std::string::npos;
  const bool edges = !text.empty() && text.front() != ',' && text.back() != ',' && text.find(",,") == std::string::npos;
  return digits && edges ? std::string() : "'" + text + "' is not a grid; write sizes such as 32,32";
}

}  // namespace

int main(int argc, char* argv[]) {
  (void)std::signal(SIGPIPE, SIG_IGN);
  spdlog::set_default_logger(spdlog::stderr_color_mt("dmoe-bench"));  // stdout is for results.
  spdlog::set_level(spdlog::level::warn);
  CLI::App app(
      "Measures dmoe on this machine. Each suite measures its own baseline in the same run, so that a ratio "
      "means something on a noisy machine.");
  app.require_subcommand(1);
  app.failure_message(CLI::FailureMessage::help);
  bool json = false;
  Options options;
  std::vector<std::string> grids;
  const Suite* chosen = nullptr;
  std::vector<Suite> suites;
  suites.reserve(std::size(kSuites));
  for (const auto& suite : kSuites) {
    suites.emplace_back(suite.run);
    auto* command = app.add_subcommand(suite.name, suite.what);
    command->add_flag("--json", json, "One JSON object per line");
    command->add_option("--seed", options.seed, "Random seed")->capture_default_str();
    command->add_option("--seconds", options.seconds, "Duration of one measurement, seconds")->capture_default_str();
    command->add_option("--nodes", options.nodes, "Number of DHT nodes (dht, dht-sim)");
    command
        ->add_option("--compute-threads", options.compute_threads,
                     "Compute threads of each server process, 0: the server's default (layer)")
        ->capture_default_str();
    command->add_option("--grid", grids, "Grid sizes such as 32,32; repeatable (beam)")->check(check_grid);
    command
        ->add_option("--distribution", options.distribution,
                     "Of delays: exponential, constant or weibull with --shape; weibull of shape 1 is the exponential "
                     "distribution, which the paper used (latency)")
        ->check(CLI::IsMember({"exponential", "constant", "weibull"}))
        ->capture_default_str();
    command->add_option("--shape", options.shape, "Shape of the Weibull distribution (latency)")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    command
        ->add_option("--trace", options.trace,
                     "Folder for traces of the trainer (trainer.json) and of each server (server0.json, ...) (latency)")
        ->check(CLI::ExistingDirectory);
    command->add_option("--mode", options.mode, "Run only this part of the suite");
    command->callback([&chosen, &here = suites.back()] { chosen = &here; });
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    const int code = app.exit(e);
    return code == 0 ? 0 : 2;
  }
  for (const auto& grid : grids) options.grids.push_back(parse_grid(grid));
  Reporter reporter(json);
  try {
    (*chosen)(options, reporter);
  } catch (const std::exception& e) {
    std::cerr << "dmoe-bench: " << e.what() << '\n';
    return 1;
  }
  return 0;
}
