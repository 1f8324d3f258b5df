// Training over a slow network: what many steps in flight hide, and what four layers one after the other cost.
#include "bench/four_servers.hpp"
#include "dmoe/async_trainer.hpp"

#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <vector>

namespace dmoe::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kInFlight = 64;
constexpr std::chrono::minutes kPatience{2};  ///< 64 steps on two cores queue for seconds without any delay.

/// One way each. The paper draws one delay per call, with a mean of 200 ms at most: throughput_client.py of its authors
/// sleeps `ping * numpy.random.weibull(1)` after each block's answer. Here a message also waits for slower ones before
/// it on its connection, as TCP has it, so that the mean is larger than what is drawn.
constexpr double kDelaysMs[] = {0, 10, 50, 100, 200};

constexpr std::size_t kLayers = 4;
constexpr std::int64_t kLayerRows = 64;
constexpr double kRoundTripsMs[] = {0, 50, 100, 200};
constexpr int kLayerSteps = 5;

double since_ms(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

torch::Tensor random_rows(std::int64_t rows) { return torch::randn({rows, four_servers::kFeatures}); }

/// Four servers behind a relay and a trainer's client.
struct SlowSwarm {
  explicit SlowSwarm(const Options& options)
      : relay(4, options.seed), servers(four_servers::servers(relay, 4, options)) {
    relay.start(servers.ports());
    torch::manual_seed(options.seed);
    ClientOptions client_options;
    client_options.initial_peers({"127.0.0.1:" + std::to_string(servers.first_port())});
    if (!options.trace.empty()) client_options.trace_file(options.trace / "trainer.json");
    client = Client::connect(std::move(client_options));
  }

  DMoE layer() const {
    return DMoE(
        client,
        four_servers::layer().forward_timeout(kPatience).backward_timeout(kPatience).timeout_after_k_min(kPatience));
  }

  testbed::NetworkRelay relay;
  ServerProcesses servers;
  std::shared_ptr<Client> client;
};

/// Steps that end per second, and what the relay saw.
struct Rate {
  double rows_per_s = 0;
  testbed::RelayCounts network;
};

class InFlight {
 public:
  explicit InFlight(const SlowSwarm& swarm)
      : layer_(swarm.layer()),
        optimizer_(layer_->parameters(), torch::optim::SGDOptions(1e-3)),
        trainer_(layer_, optimizer_, AsyncTrainerOptions().in_flight(kInFlight)) {}

  Rate measure(testbed::NetworkRelay& relay, const testbed::LinkConditions& conditions, double seconds) {
    relay.set(conditions);
    const auto old = ended();
    while (ended() < old + kInFlight + kInFlight / 4) submit();  // Those begun before, and some that were not.
    relay.reset_counts();
    const auto start = Clock::now();
    const auto first = ended();
    while (since_ms(start) < seconds * 1'000) submit();
    const double rows = static_cast<double>(ended() - first) * static_cast<double>(four_servers::kRows);
    return {rows / since_ms(start) * 1'000, relay.counts()};
  }

  AsyncTrainerStats stats() const { return trainer_.stats(); }

 private:
  void submit() {
    (void)trainer_.submit(
        [](DMoEImpl& layer) { return layer.forward(random_rows(four_servers::kRows)).pow(2).mean(); });
  }

  std::uint64_t ended() const {
    const auto stats = trainer_.stats();
    if (stats.failed > 0) throw std::runtime_error("a step failed: " + stats.last_failure);
    return stats.applied + stats.dropped;
  }

  DMoE layer_;
  torch::optim::SGD optimizer_;
  AsyncTrainer<DMoEImpl> trainer_;
};

void measure_in_flight(SlowSwarm& swarm, const Options& options, Reporter& reporter) {
  const auto law = testbed::parse_delay_law(options.distribution);
  InFlight steps(swarm);
  const auto measure = [&](double delay) {
    const auto rate = steps.measure(swarm.relay, {delay, law, options.shape, 0}, options.seconds * 4);
    reporter.note("delay " + std::to_string(static_cast<int>(delay)) +
                  " ms: " + std::to_string(static_cast<int>(rate.rows_per_s)) + " rows/s");
    return rate;
  };
  std::vector<Rate> rates;
  for (const double delay : kDelaysMs) rates.push_back(measure(delay));
  rates.front().rows_per_s = (rates.front().rows_per_s + measure(0).rows_per_s) / 2;  // The machine may have changed.
  for (std::size_t i = 0; i < rates.size(); ++i) {
    reporter.report("latency", {{"mode", "in_flight"},
                                {"delay_ms", kDelaysMs[i]},
                                {"distribution", options.distribution},
                                {"shape", law == testbed::DelayLaw::kWeibull ? options.shape : 1.0},
                                {"measured_delay_ms", rates[i].network.mean_delay_ms},
                                {"in_flight", kInFlight},
                                {"rows_per_step", four_servers::kRows},
                                {"rows_per_s", rates[i].rows_per_s},
                                {"ratio", rates[i].rows_per_s / rates.front().rows_per_s},
                                {"mean_staleness", steps.stats().mean_staleness}});
  }
}

/// One step through layers that are called one after the other: milliseconds of each.
struct LayeredStep {
  double total = 0;
  std::vector<double> forward;
  std::vector<double> backward;
};

LayeredStep layered_step(const std::vector<DMoE>& layers) {
  LayeredStep step;
  const auto start = Clock::now();
  auto x = random_rows(kLayerRows);
  for (auto layer : layers) {
    const auto begin = Clock::now();
    x = layer->forward(x);
    step.forward.push_back(since_ms(begin));
  }
  x.pow(2).mean().backward();
  step.total = since_ms(start);
  for (const auto& layer : layers) {
    double longest = 0;
    for (const auto& call : layer->last_call()) {
      if (call.backward) longest = std::max(longest, std::chrono::duration<double, std::milli>(call.waited).count());
    }
    step.backward.push_back(longest);
  }
  return step;
}

void measure_layers(SlowSwarm& swarm, Reporter& reporter) {
  std::vector<DMoE> layers;
  for (std::size_t i = 0; i < kLayers; ++i) layers.push_back(swarm.layer());
  double at_zero = 0;
  for (const double round_trip : kRoundTripsMs) {
    swarm.relay.set({round_trip / 2, testbed::DelayLaw::kConstant, 1, 0});
    for (int i = 0; i < 2; ++i) (void)layered_step(layers);  // Connections for large messages are made when needed.
    std::vector<LayeredStep> steps;
    for (int i = 0; i < kLayerSteps; ++i) steps.push_back(layered_step(layers));
    std::sort(steps.begin(), steps.end(), [](const auto& a, const auto& b) { return a.total < b.total; });
    const auto& usual = steps[steps.size() / 2];
    if (round_trip == 0) at_zero = usual.total;
    const double expected = at_zero + 2.0 * static_cast<double>(kLayers) * round_trip;
    reporter.report("latency", {{"mode", "layers"},
                                {"layers", kLayers},
                                {"round_trip_ms", round_trip},
                                {"step_ms", usual.total},
                                {"expected_ms", expected},
                                {"ratio", usual.total / expected},
                                {"forward_ms", usual.forward},
                                {"backward_ms", usual.backward}});
  }
}

}  // namespace

void latency_suite(const Options& options, Reporter& reporter) {
  SlowSwarm swarm(options);
  const auto wanted = [&](const char* mode) { return !options.mode || *options.mode == mode; };
  if (wanted("layers")) measure_layers(swarm, reporter);
  if (wanted("in_flight")) measure_in_flight(swarm, options, reporter);
}

}  // namespace dmoe::bench
