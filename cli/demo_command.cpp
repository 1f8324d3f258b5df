// `dmoe demo`: the whole system on one machine, with a server that dies.
#include "cli/classifier.hpp"
#include "cli/command.hpp"
#include "cli/demo_report.hpp"
#include "cli/demo_swarm.hpp"
#include "cli/expert_probe.hpp"
#include "cli/image_dataset.hpp"
#include "cli/matrix_speed.hpp"
#include "cli/options.hpp"
#include "cli/progress.hpp"
#include "cli/size_estimate.hpp"
#include "cli/stop_signals.hpp"
#include "cli/training.hpp"

#include "dmoe/client.hpp"

#include <torch/types.h>
#include <torch/utils.h>
#include <CLI/CLI.hpp>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>

namespace dmoe::cli {
namespace {

using Clock = std::chrono::steady_clock;

/// Of forward and of backward: no step may hang longer than this on a dead server.
constexpr std::chrono::milliseconds kForwardTimeout{1'000};
constexpr std::chrono::milliseconds kAfterKMin{500};  ///< For stragglers, once every row has an answer.
constexpr std::chrono::milliseconds kProbeTimeout{2'000};
constexpr std::int64_t kTestRows = 1'000;  ///< Rows of one batch of the final test.

struct DemoOptions {
  std::string data = kDefaultDataDirectory;
  std::int64_t steps = 1'500;
  std::int64_t batch_size = 128;
  std::int64_t servers = 4;
  std::int64_t experts = 16;
  std::int64_t hidden_dim = 64;
  std::int64_t k_best = 4;
  double learning_rate = 0.001;
  std::uint64_t seed = 0;
  bool keep = false;
  bool json = false;
};

DMoEOptions layer_options(const DemoOptions& options) {
  return DMoEOptions(options.hidden_dim, {options.servers, options.experts / options.servers}, "ffn")
      .k_best(options.k_best)
      .k_min(1)
      .forward_timeout(kForwardTimeout)
      .backward_timeout(kForwardTimeout)
      .timeout_after_k_min(kAfterKMin)
      .allow_zero_outputs(true);
}

TrainingOptions training_options(const DemoOptions& options) {
  TrainingOptions training;
  training.steps = options.steps;
  training.batch_size = options.batch_size;
  training.learning_rate = options.learning_rate;
  training.seed = options.seed;
  return training;
}

/// The experts that answer now, of all that the DHT lists.
std::size_t count_live(Client& client) {
  return answering_experts(client, client.list_experts("ffn", 2), kProbeTimeout).size();
}

/// Trains and tests in a swarm that is up. Throws what the layers throw.
Result<DemoReport> train_in(DemoSwarm& swarm, const DemoOptions& options, const ImageDataset& data,
                            StopSignals& signals) {
  auto client = Client::try_connect(ClientOptions().initial_endpoints(swarm.initial_peers()));
  if (!client) return client.error();
  DemoReport report;
  report.experts_start = count_live(**client);
  Classifier model(data.features(), data.classes, *client, layer_options(options));
  const std::int64_t kill_before = options.servers > 1 ? options.steps / 2 : -1;
  Result<TrainingReport> training = Error{};
  {
    Progress progress(stdout, options.steps);
    training = train(model, data, training_options(options), progress, signals, [&](std::int64_t step) {
      if (step != kill_before) return;
      swarm.kill_server(static_cast<std::size_t>(options.servers) - 1);
      ++report.servers_killed;
      progress.say("killed server " + std::to_string(options.servers - 1) + " with SIGKILL; training goes on");
    });
  }
  if (!training) return training.error();
  if (training->interrupted) return Error{Errc::kCancelled, "interrupted", {}};
  report.steps = static_cast<std::int64_t>(training->step_ms.size());
  report.failed_steps = training->failed_steps;
  describe_kill(training->step_ms, kill_before, report);
  report.failed_calls = model->experts->stats().failed_calls;
  report.test_accuracy = accuracy(model, data.test, kTestRows);
  report.experts_end = count_live(**client);
  return report;
}

Outcome explain_failure(const Error& error, DemoSwarm& swarm, const DemoOptions& options) {
  std::string message = "training failed: " + error.message;
  if (const auto ended = swarm.unexpected_end()) message += "\n" + *ended;
  message += options.keep ? "\nall logs are in " + swarm.directory().string() : "\nto keep all logs, add --keep";
  return failed(message);
}

SwarmOptions swarm_options(const DemoOptions& options) {
  SwarmOptions swarm;
  std::error_code error;
  swarm.program = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error || !std::filesystem::exists(swarm.program, error))
    swarm.program = "/proc/self/exe";  // Replaced by a build.
  swarm.servers = options.servers;
  swarm.experts_per_server = options.experts / options.servers;
  swarm.hidden_dim = options.hidden_dim;
  swarm.learning_rate = options.learning_rate;
  swarm.seed = options.seed;
  return swarm;
}

/// All servers and the trainer share this machine.
Result<void> check_size(const DemoOptions& options) {
  expert_server::ExpertOptions expert;
  expert.hidden_dim = options.hidden_dim;
  expert.max_batch_size = options.batch_size;
  return check_fits("a demo of " + std::to_string(options.experts) + " experts with --hidden-dim " +
                        std::to_string(options.hidden_dim) + " and --batch-size " + std::to_string(options.batch_size),
                    size_of_experts(expert, static_cast<double>(options.experts)), memory_limit(),
                    "lower one of these");
}

Outcome run_demo(const DemoOptions& options) {
  if (options.experts % options.servers != 0) {
    return wrong_use("--experts " + std::to_string(options.experts) + " cannot be shared evenly by --servers " +
                     std::to_string(options.servers) + "; use a multiple");
  }
  if (const auto fits = check_size(options); !fits) return wrong_use(fits.error().message);
  const auto start = Clock::now();
  StopSignals signals;
  const auto data = load_images(options.data);
  if (!data) return failed(data.error().message);
  warn_of_slow_matrices();
  if (options.seed != 0) torch::manual_seed(options.seed);
  std::printf("starting a DHT node and %lld expert servers with %lld experts\n",
              static_cast<long long>(options.servers), static_cast<long long>(options.experts));
  std::fflush(stdout);
  auto swarm = DemoSwarm::start(swarm_options(options), signals);
  if (!swarm) return signals.requested() ? done() : failed(swarm.error().message);
  if (options.keep) swarm->keep_directory();
  std::printf("ready after %.1f s; training on %lld images of %s\n",
              std::chrono::duration<double>(Clock::now() - start).count(), static_cast<long long>(data->train.size()),
              options.data.c_str());
  std::fflush(stdout);
  Result<DemoReport> report = Error{};
  try {
    report = train_in(*swarm, options, *data, signals);
  } catch (const std::exception& error) {
    report = Error{Errc::kInternal, error.what(), {}};
  }
  if (!report && !signals.requested()) return explain_failure(report.error(), *swarm, options);
  swarm->stop();
  if (!report) {
    std::puts("interrupted; all processes have ended");
    return done();
  }
  report->seconds = std::chrono::duration<double>(Clock::now() - start).count();
  print_table(*report, stdout);
  if (options.keep) std::printf("logs and data are in %s\n", swarm->directory().c_str());
  if (options.json) std::puts(to_json(*report).c_str());
  return done();
}

}  // namespace

void add_demo_command(CLI::App& app, Selection& selection) {
  auto options = std::make_shared<DemoOptions>();
  CLI::App* command = app.add_subcommand(
      "demo", "Train on Fashion-MNIST with expert servers on this machine, one of which is killed half way");
  command->add_option("--data", options->data, "Directory of the four IDX files, plain or gzipped")
      ->type_name("DIR")
      ->capture_default_str();
  command->add_option("--steps", options->steps, "Training steps")
      ->type_name("COUNT")
      ->capture_default_str()
      ->check(whole_number(1, 10'000'000, "1500"));
  command->add_option("--batch-size", options->batch_size, "Images of one step")
      ->type_name("ROWS")
      ->capture_default_str()
      ->check(whole_number(1, 4'096, "128"));
  command->add_option("--servers", options->servers, "Expert servers; with more than one, one is killed")
      ->type_name("COUNT")
      ->capture_default_str()
      ->check(whole_number(1, 64, "4"));
  command->add_option("--experts", options->experts, "Experts in all; a multiple of --servers")
      ->type_name("COUNT")
      ->capture_default_str()
      ->check(whole_number(1, 4'096, "16"));
  command->add_option("--hidden-dim", options->hidden_dim, "Features of an expert's input")
      ->type_name("COUNT")
      ->capture_default_str()
      ->check(whole_number(1, 8'192, "64"));
  command->add_option("--k-best", options->k_best, "Experts that each image is sent to")
      ->type_name("COUNT")
      ->capture_default_str()
      ->check(whole_number(1, 64, "4"));
  command->add_option("--learning-rate", options->learning_rate, "Step size of Adam, here and on the servers")
      ->type_name("RATE")
      ->capture_default_str()
      ->check(decimal_number(0, 10, "0.001"));
  command->add_option("--seed", options->seed, "Of weights and order of images; 0: from the operating system")
      ->type_name("NUMBER")
      ->capture_default_str()
      ->check(whole_number(0, INT64_MAX, "42"));
  command->add_flag("--keep", options->keep, "Keep the temporary directory with the servers' logs");
  command->add_flag("--json", options->json, "End with the table as one JSON object on the last line");
  command->footer("Example: dmoe demo --steps 500 --json");
  command->callback([options, &selection] {
    selection.command = "demo";
    selection.run = [options] { return run_demo(*options); };
  });
}

}  // namespace dmoe::cli
