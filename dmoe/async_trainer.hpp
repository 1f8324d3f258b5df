// Keeps several training steps in flight, so that a trainer does not wait for the network.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

namespace dmoe {

/// What becomes of a step whose gradients would be applied to weights that are more than max_staleness updates newer
/// than those it saw.
enum class LateStep : std::uint8_t {
  kDrop,  ///< Its gradients are dropped. Steps are applied in the order in which they end: none waits for another.
  kWait,  ///< It cannot happen: finished steps wait, and new ones begin later, where a slower step would become too
          ///< stale. Nothing is lost, but one hanging step holds up the others once the bound is reached.
};

struct AsyncTrainerOptions {
  /// Steps at once, each on a thread of its own: at least as many as a step's time on the network is longer than its
  /// time on the processor.
  TORCH_ARG(std::int64_t, in_flight) = 4;
  /// Bound of a step's staleness: updates of the weights between those that it saw and its own. -1: 4 · in_flight. With
  /// kWait and fewer than in_flight - 1, no more than max_staleness + 1 steps are in flight.
  TORCH_ARG(std::int64_t, max_staleness) = -1;
  TORCH_ARG(LateStep, late) = LateStep::kDrop;
  /// libtorch's intra-op threads of each step: with several steps in flight, the steps are the parallelism.
  TORCH_ARG(int, compute_threads) = 1;
  /// Called before each update with the step's gradients in the model's parameters, e.g. to clip them or to move a
  /// learning-rate schedule on. Called by one thread at a time. What it throws fails the step; its gradients are lost.
  TORCH_ARG(std::function<void()>, before_update);
};

/// How a step ended that did not fail.
struct TrainedStep {
  double loss = 0;
  std::uint64_t staleness = 0;  ///< Updates between the weights that it saw and its own update.
  bool applied = false;         ///< False: dropped, its staleness was above the bound.
};

/// Sums since the trainer was made.
struct AsyncTrainerStats {
  std::uint64_t applied = 0;        ///< Updates of the weights.
  std::uint64_t dropped = 0;        ///< Steps that were too stale.
  std::uint64_t failed = 0;         ///< Steps that threw.
  std::uint64_t max_staleness = 0;  ///< Of an applied step.
  double mean_staleness = 0;        ///< Of the applied steps.
  std::string last_failure;         ///< what() of the latest step that threw; empty: none did.
};

/// AsyncTrainer without its model's type.
class AsyncTrainerBase {
 public:
  AsyncTrainerBase(const AsyncTrainerBase&) = delete;
  AsyncTrainerBase& operator=(const AsyncTrainerBase&) = delete;

  /// Waits until no step is in flight. From then until the next `submit` the model and the optimizer are the caller's:
  /// to evaluate, to save, to change.
  void drain();
  AsyncTrainerStats stats() const;

 protected:
  using AnyStep = std::function<torch::Tensor(torch::nn::Module&)>;
  using Replicate = std::function<std::shared_ptr<torch::nn::Module>()>;

  AsyncTrainerBase(std::shared_ptr<torch::nn::Module> model, torch::optim::Optimizer& optimizer,
                   AsyncTrainerOptions options, const Replicate& replicate);
  ~AsyncTrainerBase();  ///< Drains, then joins the threads.
  std::future<TrainedStep> submit_any(AnyStep step);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// Asynchronous training of a model whose layers wait for a network:
///
///     dmoe::AsyncTrainer trainer(net, optimizer, dmoe::AsyncTrainerOptions().in_flight(64));
///     for (auto& batch : *loader)
///       trainer.submit([batch](NetImpl& net) { return torch::nll_loss(net.forward(batch.data), batch.target); });
///     trainer.drain();
///
/// A step is called with a replica of the model and returns the loss, of which backward is then called (a loss that
/// needs no gradient is taken as it is: the step called backward itself). It computes against one version of the
/// weights from beginning to end. Its gradients are then given to the model's own parameters and `optimizer` makes one
/// update, by one thread at a time, so the optimizer needs no lock of its own. Parameters without a gradient keep an
/// undefined one. Buffers (running statistics) become what the step left them at.
///
/// A replica per thread shares its parameters' memory with the weights that it saw, so it costs gradients and
/// activations only; one copy of the weights is kept per version that some step still sees. Replicas are clones of the
/// model, or what `replicate` makes. Their layers' counters add up in the model's own DMoE layers.
///
/// A step that throws is lost, with what it threw in its future and in stats(); the others go on.
///
/// Threads: `submit` blocks while `in_flight` steps are, and may be called by many threads. While steps are in flight
/// the model and the optimizer are the trainer's; see `drain`. A step must not write to the replica's parameters.
///
/// Source: Learning@home (arXiv 2002.04013), asynchronous training. Differs: staleness is bounded.
template <class Model>
class AsyncTrainer : public AsyncTrainerBase {
 public:
  /// Backward of the loss is called by the trainer. Runs on one of its threads.
  using Step = std::function<torch::Tensor(Model& replica)>;

  /// @param optimizer over the parameters of `model`; outlives the trainer.
  /// @param replicate makes another model with the same parameters and buffers, of any values. Default: model->clone(),
  /// which needs modules derived from torch::nn::Cloneable.
  /// @throws Exception: kInvalidArgument, options that make no sense, or a replica unlike the model.
  AsyncTrainer(std::shared_ptr<Model> model, torch::optim::Optimizer& optimizer, AsyncTrainerOptions options = {},
               std::function<std::shared_ptr<std::type_identity_t<Model>>()> replicate = {})
      : AsyncTrainerBase(model, optimizer, std::move(options), [&]() -> std::shared_ptr<torch::nn::Module> {
          return replicate ? replicate() : model->clone();
        }) {}
  AsyncTrainer(const torch::nn::ModuleHolder<Model>& model, torch::optim::Optimizer& optimizer,
               AsyncTrainerOptions options = {},
               std::function<std::shared_ptr<std::type_identity_t<Model>>()> replicate = {})
      : AsyncTrainer(model.ptr(), optimizer, std::move(options), std::move(replicate)) {}

  /// Begins `step` as soon as fewer than `in_flight` are. The future gives how it ended, or throws what it threw.
  std::future<TrainedStep> submit(Step step) {
    return submit_any(
        [step = std::move(step)](torch::nn::Module& replica) { return step(dynamic_cast<Model&>(replica)); });
  }
};

}  // namespace dmoe
