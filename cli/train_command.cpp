// `dmoe train`: trains the classifier against servers that run somewhere.
#include "cli/classifier.hpp"
#include "cli/command.hpp"
#include "cli/image_dataset.hpp"
#include "cli/matrix_speed.hpp"
#include "cli/median.hpp"
#include "cli/model_file.hpp"
#include "cli/network_options.hpp"
#include "cli/options.hpp"
#include "cli/progress.hpp"
#include "cli/size_estimate.hpp"
#include "cli/stop_signals.hpp"
#include "cli/training.hpp"

#include "dmoe/client.hpp"

#include <torch/types.h>
#include <torch/utils.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <chrono>
#include <cstdio>
#include <memory>

namespace dmoe::cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kMostCoordinates = 1'000'000;

struct TrainOptions {
  NetworkOptions network;  ///< Of these a trainer only joins.
  std::string grid = "ffn";
  std::vector<std::int64_t> grid_size{4, 4};
  std::int64_t hidden_dim = 1'024;
  std::int64_t k_best = 4;
  std::int64_t k_min = 1;
  double forward_timeout = 5;
  double backward_timeout = 5;
  double timeout_after_k_min = 1;
  std::string compression = "none";
  double patience = 30;
  std::string data = kDefaultDataDirectory;
  std::int64_t steps = 1'000;
  std::int64_t batch_size = 128;
  double learning_rate = 0.001;
  std::uint64_t seed = 0;
  int threads = 0;
  std::string save;
  std::string load;
  bool json = false;
};

DMoEOptions layer_options(const TrainOptions& options) {
  return DMoEOptions(options.hidden_dim, options.grid_size, options.grid)
      .k_best(options.k_best)
      .k_min(options.k_min)
      .backward_k_min(options.k_min)
      .compression(parse_compression(options.compression).value())
      .forward_timeout(to_milliseconds(options.forward_timeout))
      .backward_timeout(to_milliseconds(options.backward_timeout))
      .timeout_after_k_min(to_milliseconds(options.timeout_after_k_min));
}

TrainingOptions training_options(const TrainOptions& options) {
  TrainingOptions training;
  training.steps = options.steps;
  training.batch_size = options.batch_size;
  training.learning_rate = options.learning_rate;
  training.seed = options.seed;
  training.threads = options.threads;
  training.patience = to_milliseconds(options.patience);
  return training;
}

void print_result(const TrainOptions& options, const TrainingReport& training, const LayerStats& stats, double accuracy,
                  double seconds) {
  Table table;
  table.row("test accuracy", rounded(accuracy * 100, 2) + " %");
  table.row("steps", std::to_string(training.step_ms.size()));
  table.row("seconds", rounded(seconds, 1));
  table.row("usual step", rounded(median(training.step_ms), 1) + " ms");
  table.row("failed calls", std::to_string(stats.failed_calls) + " of " + std::to_string(stats.calls));
  table.row("failed steps", std::to_string(training.failed_steps));
  if (!options.save.empty()) table.row("model saved to", options.save);
  table.print(stdout);
  if (!options.json) return;
  nlohmann::ordered_json json{{"test_accuracy", accuracy},
                              {"steps", training.step_ms.size()},
                              {"seconds", seconds},
                              {"usual_step_ms", median(training.step_ms)},
                              {"calls", stats.calls},
                              {"failed_calls", stats.failed_calls},
                              {"failed_steps", training.failed_steps}};
  if (!options.save.empty()) json["saved"] = options.save;
  std::puts(json.dump().c_str());
}

/// Throws what the layers throw.
Outcome train_classifier(const TrainOptions& options) {
  const auto start = Clock::now();
  if (!options.save.empty()) {
    if (const auto can = check_can_save(options.save); !can) return failed(can.error().message);
  }
  const auto data = load_images(options.data);
  if (!data) return failed(data.error().message);
  warn_of_slow_matrices();
  if (options.seed != 0) torch::manual_seed(options.seed);
  auto client = Client::try_connect(ClientOptions()
                                        .initial_endpoints(to_endpoints(options.network.initial_peers))
                                        .join_timeout(join_timeout(options.network)));
  if (!client) return failed("cannot reach the network", client.error());
  StopSignals signals;  // Before this point there is nothing to end gracefully.
  Classifier model(data->features(), data->classes, *client, layer_options(options));
  if (!options.load.empty()) {
    if (const auto loaded = load_model(*model, options.load); !loaded) return failed(loaded.error().message);
  }
  Result<TrainingReport> training = Error{};
  {
    Progress progress(stdout, options.steps);
    training = train(model, *data, training_options(options), progress, signals);
  }
  // Whatever ended it, what was learned is kept; only a model that is no longer finite is not worth it.
  const bool worth_saving = training || training.error().code != Errc::kInternal;
  if (!options.save.empty() && worth_saving) {
    if (const auto saved = save_model(*model, options.save); !saved) return failed(saved.error().message);
  }
  const std::string kept = options.save.empty() || !worth_saving ? "" : "; the model so far is in " + options.save;
  if (!training) return failed("training stopped: " + advise(training.error()) + kept);
  if (training->interrupted) {
    std::printf("interrupted after %zu steps%s\n", training->step_ms.size(), kept.c_str());
    return done();
  }
  constexpr std::int64_t kTestRows = 1'000;
  const double result = accuracy(model, data->test, kTestRows);
  print_result(options, *training, model->experts->stats(), result,
               std::chrono::duration<double>(Clock::now() - start).count());
  return done();
}

Result<void> check_size(const TrainOptions& options) {
  constexpr double kFeatures = 784;  // Of Fashion-MNIST; what matters is far above it.
  return check_fits("a trainer with --hidden-dim " + std::to_string(options.hidden_dim) + " and --batch-size " +
                        std::to_string(options.batch_size),
                    size_of_trainer(kFeatures, static_cast<double>(options.hidden_dim), options.grid_size,
                                    static_cast<double>(options.batch_size), static_cast<double>(options.k_best)),
                    memory_limit(), "lower one of these");
}

Outcome run_training(const TrainOptions& options) {
  if (options.k_min > options.k_best) {
    return wrong_use("--k-min " + std::to_string(options.k_min) + " is more than --k-best " +
                     std::to_string(options.k_best) + "; lower it");
  }
  if (options.grid_size.size() > kMaxGridDimensions) {
    return wrong_use("--grid-size names " + std::to_string(options.grid_size.size()) +
                     " dimensions; a grid has at most " + std::to_string(kMaxGridDimensions));
  }
  if (const auto fits = check_size(options); !fits) return wrong_use(fits.error().message);
  try {
    return train_classifier(options);
  } catch (const Exception& error) {
    return failed("training stopped", error.error());
  }
}

void add_layer_options(CLI::App& command, TrainOptions& options) {
  add_join_options(command, options.network);
  command.get_option("--initial-peers")->required();
  command.add_option("--grid", options.grid, "Name of the experts' grid: ffn for experts ffn.0.0, ffn.0.1, ...")
      ->type_name("NAME")
      ->capture_default_str()
      ->check(CLI::Validator(
          [](std::string& text) {
            return is_grid_name(text) ? std::string{} : "'" + text + "' is not a grid's name; for example ffn";
          },
          "", ""));
  command.add_option("--grid-size", options.grid_size, "Size of the grid in each dimension: '4 4' or '4,4'")
      ->type_name("COUNT ...")
      ->delimiter(',')
      ->capture_default_str()
      ->check(whole_number(1, kMostCoordinates, "32"));
  command.add_option("--hidden-dim", options.hidden_dim, "Features of an expert's input; as the servers have it")
      ->type_name("COUNT")
      ->capture_default_str()
      ->check(whole_number(1, kMostAskedFor, "1024"));
  command.add_option("--k-best", options.k_best, "Experts that each image is sent to")
      ->type_name("COUNT")
      ->capture_default_str()
      ->check(whole_number(1, 256, "4"));
  command.add_option("--k-min", options.k_min, "Answers that each image needs; with fewer the step is repeated")
      ->type_name("COUNT")
      ->capture_default_str()
      ->check(whole_number(1, 256, "1"));
  command
      .add_option("--compression", options.compression,
                  "How values travel to the experts and back: none, float16, bfloat16 or int8")
      ->type_name("NAME")
      ->capture_default_str()
      ->check(CLI::Validator(
          [](std::string& text) {
            const auto known = parse_compression(text);
            return known ? std::string{} : known.error().message;
          },
          "", ""));
  const auto seconds = [&](const char* name, double& value, const char* about) {
    command.add_option(name, value, about)
        ->type_name("SECONDS")
        ->capture_default_str()
        ->check(decimal_number(0.001, 86'400, "5"));
  };
  seconds("--forward-timeout", options.forward_timeout, "Limit of a forward pass, in seconds");
  seconds("--backward-timeout", options.backward_timeout, "Limit of a backward pass, in seconds");
  seconds("--timeout-after-k-min", options.timeout_after_k_min,
          "How long slow experts are waited for once every image has --k-min answers, in seconds");
  seconds("--patience", options.patience, "Give up when no step has succeeded for this long, in seconds");
}

void add_training_options(CLI::App& command, TrainOptions& options) {
  command.add_option("--data", options.data, "Directory of the four IDX files, plain or gzipped")
      ->type_name("DIR")
      ->capture_default_str();
  command.add_option("--steps", options.steps, "Training steps")
      ->type_name("COUNT")
      ->capture_default_str()
      ->check(whole_number(1, 1'000'000'000, "1000"));
  command.add_option("--batch-size", options.batch_size, "Images of one step")
      ->type_name("ROWS")
      ->capture_default_str()
      ->check(whole_number(1, kMostAskedFor, "128"));
  command.add_option("--learning-rate", options.learning_rate, "Step size of Adam for the trainer's own parameters")
      ->type_name("RATE")
      ->capture_default_str()
      ->check(decimal_number(0, 10, "0.001"));
  command
      .add_option("--threads", options.threads, "Threads of one computation; 0: as many as other processes leave free")
      ->type_name("COUNT")
      ->capture_default_str()
      ->check(whole_number(0, 1'024, "1"));
  command.add_option("--seed", options.seed, "Of weights and order of images; 0: from the operating system")
      ->type_name("NUMBER")
      ->capture_default_str()
      ->check(whole_number(0, INT64_MAX, "42"));
  command
      .add_option(
          "--save", options.save,
          "Write the trainer's own weights to this file at the end, also of an interrupted run, replacing it in "
          "one step; the experts' weights stay on their servers")
      ->type_name("FILE");
  command
      .add_option("--load", options.load,
                  "Start from the weights that --save wrote, with the same --hidden-dim and --grid-size; the state of "
                  "Adam starts afresh")
      ->type_name("FILE");
  command.add_flag("--json", options.json, "End with the result as one JSON object on the last line");
}

}  // namespace

void add_train_command(CLI::App& app, Selection& selection) {
  auto options = std::make_shared<TrainOptions>();
  CLI::App* command = app.add_subcommand("train", "Train a Fashion-MNIST classifier on running expert servers");
  add_layer_options(*command, *options);
  add_training_options(*command, *options);
  command->footer("Example: dmoe train --initial-peers 203.0.113.5:4040 --grid-size 4 4 --hidden-dim 512");
  command->callback([options, &selection] {
    selection.command = "train";
    selection.run = [options] { return run_training(*options); };
  });
}

}  // namespace dmoe::cli
