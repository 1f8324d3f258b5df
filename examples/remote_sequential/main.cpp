// A model in stages, each on a machine of its own: two local layers around a pipeline of remote ones.
//
//   remote_sequential HOST:PORT UID... [STEPS]
//
// It learns to tell the arms of two spirals apart.
#include "dmoe/client.hpp"
#include "dmoe/remote_sequential.hpp"

#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

constexpr std::int64_t kWidth = 32;  // `--hidden-dim` of the servers.

struct Points {
  torch::Tensor places;  // [rows, 2]
  torch::Tensor arms;    // [rows], 0 or 1
};

/// Two arms that wind around the origin, half a turn apart, with some noise.
Points spirals(std::int64_t rows) {
  const auto arms = torch::randint(2, {rows}, torch::kInt64);
  const auto radius = torch::rand({rows}).sqrt();
  const auto angle = radius * 3 * M_PI + arms * M_PI;
  const auto places = torch::stack({radius * angle.cos(), radius * angle.sin()}, 1);
  return {places + torch::randn_like(places) * 0.02, arms};
}

struct NetImpl : torch::nn::Module {
  NetImpl(const std::shared_ptr<dmoe::Client>& client, const std::vector<std::string>& uids)
      : in(register_module("in", torch::nn::Linear(2, kWidth))),
        stages(register_module("stages", dmoe::RemoteSequential(client, uids))),
        out(register_module("out", torch::nn::Linear(kWidth, 2))) {}

  torch::Tensor forward(const torch::Tensor& places) { return out(stages(torch::relu(in(places)))); }

  torch::nn::Linear in;
  dmoe::RemoteSequential stages;
  torch::nn::Linear out;
};
TORCH_MODULE(Net);

int main(int argc, char** argv) try {
  std::vector<std::string> words(argv + 1, argv + argc);
  int steps = 200;
  if (!words.empty() && words.back().find_first_not_of("0123456789") == std::string::npos) {
    steps = std::stoi(words.back());
    words.pop_back();
  }
  if (words.size() < 2) throw std::invalid_argument("usage: remote_sequential HOST:PORT UID... [STEPS]");
  const auto client = dmoe::Client::connect(dmoe::ClientOptions().initial_peers({words[0]}));
  torch::manual_seed(1);
  Net net(client, std::vector<std::string>(words.begin() + 1, words.end()));
  for (auto stage : net->stages->stages()) {
    const auto info = stage->info();
    std::printf("%s: %s, %lu updates so far\n", info.uid.c_str(), info.architecture.c_str(), info.updates);
  }
  torch::optim::Adam optimizer(net->parameters(), 1e-3);  // Of what is here; each stage has its own.
  for (int step = 1; step <= steps; ++step) {
    const auto batch = spirals(128);
    optimizer.zero_grad();
    const auto loss = torch::cross_entropy_loss(net(batch.places), batch.arms);
    loss.backward();
    optimizer.step();
    if (step % 50 == 0 || step == steps) std::printf("step %d  loss %.3f\n", step, loss.item<double>());
  }
  net->eval();
  const torch::NoGradGuard no_grad;
  const auto test = spirals(2'000);
  const auto right = net(test.places).argmax(1).eq(test.arms).to(torch::kFloat32).mean().item<double>();
  std::printf("accuracy %.1f %%\n", 100 * right);
} catch (const std::exception& error) {
  std::fprintf(stderr, "remote_sequential: %s\n", error.what());
  return 1;
}
