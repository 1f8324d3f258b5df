#include "cli/training.hpp"

#include "expert_server/compute_threads.hpp"

#include <spdlog/spdlog.h>
#include <torch/nn/functional/loss.h>
#include <torch/optim/adam.h>
#include <torch/types.h>

#include <cmath>
#include <utility>

namespace dmoe::cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kRetryPause{
    250};  ///< Between attempts that fail: the network needs time, not calls.

/// One forward, backward and update. @return the loss, or the error of the layer.
Result<double> step(Classifier& model, torch::optim::Adam& optimizer, const Batch& batch) {
  try {
    optimizer.zero_grad();
    const torch::Tensor loss = torch::nn::functional::cross_entropy(model->forward(batch.inputs), batch.labels);
    loss.backward();
    optimizer.step();
    return loss.item<double>();
  } catch (const Exception& error) {
    return error.error();
  } catch (const std::exception& error) {  // Out of memory, or a bug: torch says which on its first line.
    const std::string text = error.what();
    return Error{Errc::kInternal, text.substr(0, text.find('\n')), {}};
  }
}

/// Whether the same step may succeed later: servers come back, but what they refuse they will refuse again.
bool worth_repeating(Errc code) {
  return code != Errc::kInternal && code != Errc::kInvalidArgument && code != Errc::kUnauthorized;
}

/// Keeps torch, on the thread that made it, from fighting with servers of the same machine for its cores.
class TrainerThreads {
 public:
  explicit TrainerThreads(int requested) : governor_(requested) {}
  void adjust() {
    const int wanted = governor_.threads();
    if (wanted != std::exchange(used_, wanted)) expert_server::use_compute_threads(wanted);
  }

 private:
  expert_server::ThreadGovernor governor_;
  int used_ = 0;
};

double milliseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

}  // namespace

Result<TrainingReport> train(Classifier& model, const ImageDataset& data, const TrainingOptions& options,
                             Progress& progress, StopSignals& signals,
                             const std::function<void(std::int64_t)>& before_step) {
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(options.learning_rate));
  BatchSampler sampler(data.train, options.batch_size, options.seed);
  TrainerThreads threads(options.threads);
  TrainingReport report;
  model->train();
  for (std::int64_t i = 0; i < options.steps; ++i) {
    if (before_step) before_step(i);
    threads.adjust();
    const auto start = Clock::now();
    Result<double> loss = step(model, optimizer, sampler.next());
    while (!loss && worth_repeating(loss.error().code) && !signals.requested()) {
      ++report.failed_steps;
      if (Clock::now() - start > options.patience) return loss.error();
      if (report.failed_steps == 1) progress.say("a step failed and is repeated: " + loss.error().message);
      if (!signals.wait_for(kRetryPause)) loss = step(model, optimizer, sampler.next());
    }
    if (signals.requested()) {
      report.interrupted = true;
      return report;
    }
    if (!loss) return loss.error();
    if (!std::isfinite(*loss)) {
      return Error{Errc::kInternal, "the loss is no longer finite; try a smaller --learning-rate", {}};
    }
    report.step_ms.push_back(milliseconds_since(start));
    progress.show(i + 1, "loss " + rounded(*loss, 3) + ", " + rounded(report.step_ms.back(), 0) + " ms/step");
  }
  return report;
}

}  // namespace dmoe::cli
