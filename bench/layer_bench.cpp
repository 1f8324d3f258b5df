// A DMoE layer over four server processes against the same experts as local modules.
#include "bench/server_processes.hpp"
#include "bench/suite.hpp"
#include "dmoe/dmoe.hpp"

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
#include <memory>
#include <vector>

namespace dmoe::bench {
namespace {

using Clock = std::chrono::steady_clock;

struct Configuration {
  std::string name;
  std::int64_t rows;
  std::int64_t k;
  std::int64_t features;
  std::vector<std::int64_t> grid;
  std::vector<std::string> patterns;  // One server each.
};

const std::vector<Configuration>& configurations() {
  static const std::vector<Configuration> all{
      {"batch256_k4_ffn256x16", 256, 4, 256, {4, 4}, {"ffn.0.[0:4]", "ffn.1.[0:4]", "ffn.2.[0:4]", "ffn.3.[0:4]"}},
      {"batch64_k4_ffn64x32", 64, 4, 64, {8, 8}, {"ffn.0.[0:8]", "ffn.2.[0:8]", "ffn.4.[0:8]", "ffn.6.[0:8]"}},
  };
  return all;
}

/// The paper's block and its optimizer, as a server has them.
struct LocalBlock {
  explicit LocalBlock(std::int64_t h)
      : layers(torch::nn::Linear(h, 4 * h), torch::nn::LayerNorm(norm(h)), torch::nn::ReLU(),
               torch::nn::Linear(4 * h, 4 * h), torch::nn::LayerNorm(norm(h)), torch::nn::ReLU(),
               torch::nn::Linear(4 * h, h)),
        optimizer(layers->parameters(), torch::optim::AdamOptions(1e-3).amsgrad(true)) {}
  static torch::nn::LayerNormOptions norm(std::int64_t h) { return torch::nn::LayerNormOptions({4 * h}); }

  torch::nn::Sequential layers;
  torch::optim::Adam optimizer;
};

/// A mixture in one process, as a libtorch user would write it: the same gate, the same choice, the same mixture.
class LocalLayer {
 public:
  explicit LocalLayer(const Configuration& c) : c_(c), gate_(gating::ProductKeyGateOptions(c.features, c.grid)) {
    for (const auto& text : c.patterns) {
      const auto parsed = *parse_uid_pattern(text);
      for (std::uint64_t i = 0; i < parsed.size(); ++i) {
        const auto uid = parsed.at(i);
        cells_.push_back(uid.coordinates[0] * c.grid[1] + uid.coordinates[1]);
        experts_.push_back(std::make_unique<LocalBlock>(c.features));
      }
    }
  }

  torch::Tensor forward(const torch::Tensor& x) {
    const auto logits = gate_->forward(x);
    const auto all = (logits[0].unsqueeze(2) + logits[1].unsqueeze(1)).flatten(1);
    const auto live = all.index_select(1, torch::tensor(cells_, torch::kInt64));
    const auto best = live.topk(c_.k, 1);
    const auto weights = std::get<0>(best).softmax(1);
    const auto chosen = std::get<1>(best);
    auto y = torch::zeros_like(x);
    used_.clear();
    for (std::size_t e = 0; e < experts_.size(); ++e) {
      const auto where = (chosen == static_cast<std::int64_t>(e)).nonzero();
      if (where.size(0) == 0) continue;
      const auto rows = where.select(1, 0);
      const auto block = x.index_select(0, rows);
      const auto out = block + experts_[e]->layers->forward(block);
      const auto w = weights.index({rows, where.select(1, 1)}).unsqueeze(1);
      y = y.index_add(0, rows, out * w);
      used_.push_back(e);
    }
    return y;
  }

  /// What servers do in backward: clip and update.
  void update() {
    for (const auto e : used_) {
      torch::nn::utils::clip_grad_norm_(experts_[e]->layers->parameters(), 1.0);
      experts_[e]->optimizer.step();
      experts_[e]->optimizer.zero_grad();
    }
  }

 private:
  const Configuration& c_;
  gating::ProductKeyGate gate_;
  std::vector<std::int64_t> cells_;
  std::vector<std::unique_ptr<LocalBlock>> experts_;
  std::vector<std::size_t> used_;
};

double milliseconds(const std::function<void()>& step) {
  const auto start = Clock::now();
  step();
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

void compare(const Configuration& c, const std::string& mode, DMoE& remote, const Options& options, Reporter& reporter,
             const std::function<void()>& local_step, const std::function<void()>& remote_step) {
  for (int i = 0; i < 3; ++i) {
    local_step();
    remote_step();
  }
  std::vector<double> local_ms;
  std::vector<double> remote_ms;
  const auto before = remote->stats();
  const auto end = Clock::now() + std::chrono::duration<double>(options.seconds * 2);
  while (Clock::now() < end || remote_ms.size() < 5) {  // By turns: a noisy neighbour meets both.
    local_ms.push_back(milliseconds(local_step));
    remote_ms.push_back(milliseconds(remote_step));
  }
  const auto after = remote->stats();
  const auto passes = after.forwards - before.forwards + after.backwards - before.backwards;
  const double local = percentile(local_ms, 0.5);
  const double there = percentile(remote_ms, 0.5);
  reporter.report("layer", {{"config", c.name},
                            {"mode", mode},
                            {"local_ms", local},
                            {"remote_ms", there},
                            {"ratio", there / local},
                            {"messages_per_forward",
                             static_cast<double>(after.frames - before.frames) / static_cast<double>(passes)},
                            {"servers", c.patterns.size()},
                            {"compute_threads", options.compute_threads},
                            {"live_experts", remote->client()->list_experts("ffn", c.grid.size()).size()},
                            {"calls_failed", after.failed_calls - before.failed_calls}});
}

void measure(const Configuration& c, const Options& options, Reporter& reporter) {
  const ServerProcesses servers(ffn_servers(c.patterns, c.features, options.compute_threads));
  torch::manual_seed(options.seed);
  const auto client =
      Client::connect(ClientOptions().initial_peers({"127.0.0.1:" + std::to_string(servers.first_port())}));
  const auto live = client->list_experts("ffn", c.grid.size()).size();
  reporter.note(c.name + ": " + std::to_string(live) + " live experts");
  DMoE remote(client, DMoEOptions(c.features, c.grid, "ffn").k_best(c.k));
  LocalLayer local(c);
  const auto x = torch::randn({c.rows, c.features});
  const auto wanted = [&](const char* mode) { return !options.mode || *options.mode == mode; };
  if (wanted("forward")) {
    const torch::NoGradGuard no_grad;
    compare(
        c, "forward", remote, options, reporter, [&] { (void)local.forward(x); }, [&] { (void)remote->forward(x); });
  }
  if (wanted("forward_backward")) {
    const auto gradient = torch::randn_like(x) / static_cast<double>(c.rows);
    const auto input = x.clone().requires_grad_();
    compare(
        c, "forward_backward", remote, options, reporter,
        [&] {
          local.forward(input).backward(gradient);
          local.update();
        },
        [&] { remote->forward(input).backward(gradient); });
  }
}

}  // namespace

void layer_suite(const Options& options, Reporter& reporter) {
  // Forking comes before torch has threads; a second configuration would fork after, so it runs in a child of its own.
  run_each_in_a_process(configurations().size(),
                        [&](std::size_t i) { measure(configurations()[i], options, reporter); });
}

}  // namespace dmoe::bench
