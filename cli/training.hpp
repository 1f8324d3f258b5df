// The training loop of `dmoe train` and `dmoe demo`: steps, their times, and what to do when one fails.
#pragma once

#include "cli/classifier.hpp"
#include "cli/image_dataset.hpp"
#include "cli/progress.hpp"
#include "cli/stop_signals.hpp"

#include "net/error.hpp"

#include <torch/optim/adam.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace dmoe::cli {

struct TrainingOptions {
  std::int64_t steps = 1'000;
  std::int64_t batch_size = 128;               ///< Rows of one step.
  double learning_rate = 0.001;                ///< Adam's, of the trainer's own parameters.
  std::uint64_t seed = 0;                      ///< Order of the data.
  int threads = 0;                             ///< Of one computation; 0: as many as other processes leave free.
  std::chrono::milliseconds patience{30'000};  ///< Give up when no step has succeeded for this long.
};

/// What the steps took.
struct TrainingReport {
  std::vector<double> step_ms;    ///< One per finished step, in order; a step that had to be repeated counts whole.
  std::int64_t failed_steps = 0;  ///< Attempts that ended in an error and were repeated.
  bool interrupted = false;       ///< Stopped by a signal.
};

/// Runs up to `options.steps` steps and shows them on `progress`. An attempt that fails (no expert alive, no answer in
/// time) is repeated with the next batch until `patience` runs out, so a server that comes back is used again.
/// `before_step(i)` runs before step i. @return the error of the last attempt once patience ran out; kInternal when the
/// loss is no longer finite.
Result<TrainingReport> train(Classifier& model, const ImageDataset& data, const TrainingOptions& options,
                             Progress& progress, StopSignals& signals,
                             const std::function<void(std::int64_t)>& before_step = {});

}  // namespace dmoe::cli
