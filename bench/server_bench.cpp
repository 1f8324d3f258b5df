// A served expert against the same block as a local libtorch module, at the same batch and thread count.
#include "bench/rpc_floor.hpp"
#include "bench/served_expert.hpp"
#include "bench/suite.hpp"
#include "expert_server/compute_threads.hpp"

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <chrono>
#include <functional>
#include <future>
#include <thread>

namespace dmoe::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kHidden = 1'024;
constexpr int kClients = 4;
constexpr std::int64_t kRows = 2'048;  ///< Of one call; other numbers are modes of their own, "forward_512".
constexpr int kServerRounds = 3;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// The paper's block and its optimizer, written as a libtorch user would.
class LocalExpert {
 public:
  LocalExpert()
      : layers_(torch::nn::Linear(kHidden, 4 * kHidden), torch::nn::LayerNorm(norm_options()), torch::nn::ReLU(),
                torch::nn::Linear(4 * kHidden, 4 * kHidden), torch::nn::LayerNorm(norm_options()), torch::nn::ReLU(),
                torch::nn::Linear(4 * kHidden, kHidden)),
        optimizer_(layers_->parameters(), torch::optim::AdamOptions(1e-3).amsgrad(true)) {}

  void forward(const at::Tensor& x) {
    const torch::NoGradGuard no_grad;
    const auto y = x + layers_->forward(x);
  }

  void forward_backward(const at::Tensor& x, const at::Tensor& gradient) {
    auto input = x.detach().requires_grad_(true);
    optimizer_.zero_grad();
    const auto y = input + layers_->forward(input);
    y.backward(gradient);
    torch::nn::utils::clip_grad_norm_(layers_->parameters(), 1.0);
    optimizer_.step();
  }

 private:
  static torch::nn::LayerNormOptions norm_options() { return torch::nn::LayerNormOptions({4 * kHidden}); }
  torch::nn::Sequential layers_;
  torch::optim::Adam optimizer_;
};

/// Rows per second of `step` repeated for about `seconds`, on a thread that owns the torch threads.
double local_rate(const std::function<void()>& step, std::int64_t rows, double seconds, int threads) {
  return std::async(std::launch::async,
                    [&] {
                      expert_server::use_compute_threads(threads);
                      step();
                      const auto start = Clock::now();
                      std::int64_t steps = 0;
                      for (; steps == 0 || seconds_since(start) < seconds; ++steps) step();
                      return static_cast<double>(steps * rows) / seconds_since(start);
                    })
      .get();
}

/// The same of `kClients` clients at once; each repeats `step(client)`. From the first call to the last answer.
double served_rate(const std::function<void(int)>& step, std::int64_t rows, double seconds) {
  for (int i = 0; i < kClients; ++i) step(i);
  return rate_of_callers(kClients, step, rows, seconds);
}

void compare(Reporter& reporter, const std::string& mode, std::int64_t rows, int threads, double seconds,
             const std::function<void()>& local, const std::function<void(int)>& served) {
  double local_sum = 0;
  double served_sum = 0;
  for (int round = 0; round < kServerRounds; ++round) {  // Interleaved: a noisy neighbour meets both.
    local_sum += local_rate(local, rows, seconds, threads);
    served_sum += served_rate(served, rows, seconds);
  }
  reporter.report("server", {{"mode", mode},
                             {"clients", kClients},
                             {"rows", rows},
                             {"compute_threads", threads},
                             {"local_rows_per_s", local_sum / kServerRounds},
                             {"server_rows_per_s", served_sum / kServerRounds},
                             {"efficiency", served_sum / local_sum}});
}

void measure_ffn(const Options& options, Reporter& reporter, std::int64_t rows, int threads) {
  expert_server::ExpertOptions expert;
  expert.hidden_dim = kHidden;
  expert.max_batch_size = rows;  // The same batch on both sides: company would only help the server.
  const auto server = serve(expert, "ffn.[0:1]", threads);
  ClientThread thread;
  std::vector<std::unique_ptr<ExpertClient>> clients;
  for (int i = 0; i < kClients; ++i) clients.push_back(std::make_unique<ExpertClient>(thread, server->port()));
  const auto x = torch::randn({rows, kHidden});
  const auto gradient = torch::randn({rows, kHidden}) / static_cast<double>(rows);
  LocalExpert local;
  const std::string suffix = rows == kRows ? "" : "_" + std::to_string(rows);
  const auto wanted = [&](const std::string& mode) { return !options.mode || *options.mode == mode + suffix; };
  if (wanted("forward")) {
    compare(
        reporter, "forward" + suffix, rows, threads, options.seconds, [&] { local.forward(x); },
        [&](int i) { clients[static_cast<std::size_t>(i)]->forward("ffn.0", x); });
  }
  // One backward call is a forward pass, a backward pass and an optimizer step: the same work as the local step.
  if (wanted("forward_backward")) {
    compare(
        reporter, "forward_backward" + suffix, rows, threads, options.seconds,
        [&] { local.forward_backward(x, gradient); },
        [&](int i) { clients[static_cast<std::size_t>(i)]->backward("ffn.0", x, gradient); });
  }
}

/// One row through decode, queue, device thread and reply, against a raw TCP echo of the same bytes.
void measure_nop(const Options& options, Reporter& reporter) {
  expert_server::ExpertOptions expert;
  expert.architecture = "nop";
  expert.hidden_dim = kHidden;
  const auto server = serve(expert, "nop.[0:1]", 1);
  ClientThread thread;
  ExpertClient client(thread, server->port());
  const auto floor = tcp_echo(4UL * kHidden, 1, std::chrono::duration<double>(options.seconds));
  const auto x = torch::randn({1, kHidden});
  std::vector<double> samples;
  client.forward("nop.0", x);
  const auto start = Clock::now();
  while (samples.empty() || seconds_since(start) < options.seconds) {
    const auto before = Clock::now();
    client.forward("nop.0", x);
    samples.push_back(1e6 * seconds_since(before));
  }
  const auto p99 = percentile(samples, 0.99);
  const auto p50 = percentile(samples, 0.5);
  reporter.report("server", {{"mode", "nop_row"},
                             {"floor_p50_us", floor.p50_us},
                             {"p50_us", p50},
                             {"p99_us", p99},
                             {"ratio", p50 / floor.p50_us}});
}

}  // namespace

void server_suite(const Options& options, Reporter& reporter) {
  const int threads = expert_server::effective_compute_threads(0);
  if (!options.mode || *options.mode == "nop_row") measure_nop(options, reporter);
  if (options.mode && *options.mode == "nop_row") return;
  measure_ffn(options, reporter, kRows, threads);
  measure_ffn(options, reporter, 512, threads);
}

}  // namespace dmoe::bench
