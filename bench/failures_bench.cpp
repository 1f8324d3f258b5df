// Training while a tenth of the calls is lost, one server of four hangs and one is killed.
#include "bench/four_servers.hpp"
#include "dmoe/async_trainer.hpp"
#include "expert_server/expert_factory.hpp"

#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace dmoe::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kLostCalls = 0.1;
constexpr std::chrono::seconds kSettle{5};  ///< From the faults to the measurement.
constexpr int kGradientChecks = 10;
constexpr std::size_t kHangs = 2;   ///< Of the four servers.
constexpr std::size_t kKilled = 3;  ///< The first two survive, and lose answers.

struct Mode {
  const char* name;
  std::int64_t in_flight;
};
constexpr Mode kModes[] = {{"in_flight", 16}, {"one_at_a_time", 1}};

/// Experts with known parameters that do not change: the same are made here.
expert_server::ExpertOptions expert_options() {
  expert_server::ExpertOptions options;
  options.hidden_dim = four_servers::kFeatures;
  options.learning_rate = 0.0;  // The optimizer works as ever.
  return options;
}

std::vector<expert_server::ServerOptions> unchanging_servers(const testbed::NetworkRelay& relay,
                                                             const Options& options) {
  auto servers = four_servers::servers(relay, kHangs, options);
  for (auto& server : servers) {
    server.expert = expert_options();
    server.seed = options.seed;
  }
  return servers;
}

torch::Tensor random_inputs() { return torch::randn({four_servers::kRows, four_servers::kFeatures}); }

class Training {
 public:
  Training(const DMoE& layer, std::int64_t in_flight)
      : layer_(layer),
        optimizer_(layer_->parameters(), torch::optim::SGDOptions(0.0)),
        trainer_(layer_, optimizer_, AsyncTrainerOptions().in_flight(in_flight)) {}

  /// Steps go on for `seconds`. @return rows per second of those that ended.
  double run(double seconds) {
    const auto start = Clock::now();
    const auto first = ended();
    while (elapsed(start) < seconds) {
      (void)trainer_.submit([this](DMoEImpl& layer) {
        const auto begin = Clock::now();
        const auto loss = layer.forward(random_inputs()).pow(2).mean();
        loss.backward();
        note_step(elapsed(begin) * 1'000);
        return loss.detach();
      });
    }
    return static_cast<double>(ended() - first) * static_cast<double>(four_servers::kRows) / elapsed(start);
  }

  void drain() { trainer_.drain(); }
  double longest_step_ms() const {
    const std::lock_guard lock(mutex_);
    return longest_ms_;
  }
  void forget_longest() {
    const std::lock_guard lock(mutex_);
    longest_ms_ = 0;
  }
  std::uint64_t failed_steps() const { return trainer_.stats().failed; }
  std::string last_failure() const { return trainer_.stats().last_failure; }

 private:
  static double elapsed(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }
  void note_step(double ms) {
    const std::lock_guard lock(mutex_);
    longest_ms_ = std::max(longest_ms_, ms);
  }
  std::uint64_t ended() const {
    const auto stats = trainer_.stats();
    return stats.applied + stats.dropped;
  }

  DMoE layer_;
  torch::optim::SGD optimizer_;
  mutable std::mutex mutex_;
  double longest_ms_ = 0;  // Guarded by mutex_.
  AsyncTrainer<DMoEImpl> trainer_;
};

/// What gradients should be, from experts of this process.
class Reference {
 public:
  explicit Reference(const Options& options) : seed_(options.seed) {}

  struct Gradients {
    torch::Tensor output;
    torch::Tensor input;
    torch::Tensor gate;
  };

  /// Of output.pow(2).mean(), when `forward` answered and of these `backward` returned gradients; every row was sent to
  /// all of them.
  Gradients of(DMoE& layer, const torch::Tensor& x, const std::set<ExpertUid>& forward,
               const std::set<ExpertUid>& backward) {
    auto input = x.detach().clone().requires_grad_();
    layer->zero_grad();
    const auto logits = layer->gate->forward(input);
    std::vector<torch::Tensor> scores;
    std::vector<torch::Tensor> outputs;
    for (const auto& uid : forward) {
      scores.push_back(logits[0].select(1, static_cast<std::int64_t>(uid.coordinates[0])) +
                       logits[1].select(1, static_cast<std::int64_t>(uid.coordinates[1])));
      outputs.push_back(expert(uid).forward({x}, 0).value().front().detach().requires_grad_());
    }
    const auto weights = torch::stack(scores, 1).softmax(1).unsqueeze(2);
    const auto output = (weights * torch::stack(outputs, 1)).sum(1);
    output.pow(2).mean().backward();
    auto input_gradient = input.grad().clone();
    std::size_t i = 0;
    for (const auto& uid : forward) {
      const auto gradient = outputs[i++].grad();
      if (backward.count(uid) > 0) input_gradient += expert(uid).backward({x}, {gradient}, 0).value().front();
    }
    return {output.detach(), input_gradient, layer->gate->projection->weight.grad().clone()};
  }

 private:
  expert_server::ExpertBackend& expert(const ExpertUid& uid) {
    auto& made = experts_[uid];
    if (!made) made = std::move(expert_server::make_expert(uid, expert_options(), nullptr, false, seed_).value());
    return *made;
  }

  const std::uint64_t seed_;
  std::map<ExpertUid, std::unique_ptr<expert_server::ExpertBackend>> experts_;
};

struct GradientChecks {
  int equal = 0;
  int lost_forward = 0;   ///< Checks in which an answer of a surviving server was missing.
  int lost_backward = 0;  ///< Or a gradient.
  double largest_error = 0;
};

/// Sends all rows to all experts that live, so that it is known who answered which row.
GradientChecks check_gradients(const std::shared_ptr<Client>& client, const DMoEOptions& options,
                               Reference& reference) {
  // Not hedged: a hedge that answers first takes rows from a call that is answered as well.
  DMoE layer(client, DMoEOptions(options).k_best(16).hedge_share(0));
  GradientChecks checks;
  for (int i = 0; i < kGradientChecks; ++i) {
    auto x = random_inputs().requires_grad_();
    layer->zero_grad();
    const auto output = layer->forward(x);
    output.pow(2).mean().backward();
    std::set<ExpertUid> forward;
    std::set<ExpertUid> backward;
    for (const auto& call : layer->last_call()) {
      if (call.answered) (call.backward ? backward : forward).insert(call.uid);
    }
    const auto gate_gradient = layer->gate->projection->weight.grad().clone();
    const auto expected = reference.of(layer, x.detach(), forward, backward);
    // Of the whole, not of the worst element: where a unit's input rounds to either side of ReLU's kink, one row's
    // gradient differs a little. Without one expert's gradient for one row it would be above 1e-3.
    const auto error = [](const torch::Tensor& got, const torch::Tensor& wanted) {
      return ((got - wanted).norm() / wanted.norm()).item<double>();
    };
    const double worst = std::max({error(output.detach(), expected.output), error(x.grad(), expected.input),
                                   error(gate_gradient, expected.gate)});
    checks.largest_error = std::max(checks.largest_error, worst);
    checks.equal += worst < 1e-3 ? 1 : 0;
    checks.lost_forward += forward.size() < 8 ? 1 : 0;
    checks.lost_backward += backward.size() < forward.size() ? 1 : 0;
  }
  return checks;
}

void measure(const Mode& mode, const Options& options, Reporter& reporter) {
  testbed::NetworkRelay relay(kHangs, options.seed);
  const ServerProcesses servers(unchanging_servers(relay, options));
  auto ports = servers.ports();
  ports.resize(kHangs);
  relay.start(ports);
  torch::manual_seed(options.seed);
  const auto client =
      Client::connect(ClientOptions().initial_peers({"127.0.0.1:" + std::to_string(servers.first_port())}));
  const DMoEOptions layer_options = four_servers::layer();
  DMoE layer(client, layer_options);
  Training training(layer, mode.in_flight);
  const double seconds = options.seconds * 5;

  (void)training.run(seconds / 2);
  const double clean = training.run(seconds);
  reporter.note(std::string(mode.name) + ": clean " + std::to_string(static_cast<int>(clean)) + " rows/s");

  training.forget_longest();
  const auto before = layer->stats();
  (void)kill(servers.all()[kHangs].pid, SIGSTOP);
  (void)kill(servers.all()[kKilled].pid, SIGKILL);
  testbed::LinkConditions lossy;
  lossy.lost_replies = kLostCalls;
  relay.set(lossy);
  (void)training.run(static_cast<double>(kSettle.count()));
  const auto settled = layer->stats();
  const double faulty = training.run(seconds);
  training.drain();
  const auto after = layer->stats();
  const double longest = training.longest_step_ms();
  Reference reference(options);
  const auto checks = check_gradients(client, layer_options, reference);

  relay.set({});
  (void)training.run(seconds / 2);
  const double survivors = training.run(seconds);
  training.drain();
  if (training.failed_steps() > 0) reporter.note("last failed step: " + training.last_failure());
  const auto deadline = layer_options.forward_timeout() + layer_options.backward_timeout();
  reporter.report("failures", {{"mode", mode.name},
                               {"in_flight", mode.in_flight},
                               {"faulty_rows_per_s", faulty},
                               {"clean_rows_per_s", clean},
                               {"ratio", faulty / clean},
                               {"survivors_rows_per_s", survivors},
                               {"ratio_to_survivors", faulty / survivors},
                               {"longest_step_ms", longest},
                               {"deadline_ms", deadline.count()},
                               {"gradients_equal", checks.equal == kGradientChecks},
                               {"largest_gradient_error", checks.largest_error},
                               {"checks", kGradientChecks},
                               {"checks_with_lost_answers", checks.lost_forward},
                               {"checks_with_lost_gradients", checks.lost_backward},
                               {"failed_steps", training.failed_steps()},
                               {"failed_calls_until_settled", settled.failed_calls - before.failed_calls},
                               {"failed_share", static_cast<double>(after.failed_calls - settled.failed_calls) /
                                                    static_cast<double>(after.calls - settled.calls)},
                               {"rows_dropped", after.rows_dropped - before.rows_dropped}});
}

}  // namespace

void failures_suite(const Options& options, Reporter& reporter) {
  run_each_in_a_process(std::size(kModes), [&](std::size_t i) {
    if (!options.mode || *options.mode == kModes[i].name) measure(kModes[i], options, reporter);
  });
}

}  // namespace dmoe::bench
