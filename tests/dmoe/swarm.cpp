#include "tests/dmoe/swarm.hpp"

#include "tests/support/seed.hpp"

#include <algorithm>

namespace dmoe::test {
namespace {

double logit_of(const std::vector<torch::Tensor>& logits, std::int64_t row, const ExpertUid& uid) {
  double sum = 0;
  for (std::size_t d = 0; d < logits.size(); ++d) {
    sum += logits[d][row][static_cast<std::int64_t>(uid.coordinates[d])].item<double>();
  }
  return sum;
}

}  // namespace

Swarm::Swarm(std::size_t hosts, std::vector<std::int64_t> grid, std::int64_t features,
             std::chrono::milliseconds ban_time)
    : grid_(std::move(grid)), features_(features), directory_(std::make_shared<MemoryDirectory>()) {
  for (std::size_t i = 0; i < hosts; ++i) hosts_.push_back(std::make_unique<ExpertHost>(std::uint8_t(i + 1)));
  UidPattern pattern{"ffn", {}};
  for (const auto size : grid_) pattern.dimensions.push_back({0, static_cast<Coordinate>(size)});
  for (std::uint64_t i = 0; i < pattern.size(); ++i) {
    const auto uid = pattern.at(i);
    uids_.push_back(uid);
    const auto weight = torch::randn({features, features}, torch::kDouble) / std::sqrt(double(features));
    weights_[uid] = weight;
    host_of(uid).host(uid, [weight](const Tensors& inputs) -> Tensors {
      return {inputs.front().matmul(weight.to(inputs.front().scalar_type())).tanh()};
    });
    directory_->add(uid, host_of(uid).address());
  }
  client_ = Client::with_resolver(directory_, ClientOptions().ban_time(ban_time));
}

std::size_t Swarm::frames() const {
  std::size_t sum = 0;
  for (const auto& host : hosts_) sum += host->frames();
  return sum;
}

std::size_t Swarm::calls() const {
  std::size_t sum = 0;
  for (const auto& host : hosts_) sum += host->calls();
  return sum;
}

torch::Tensor Swarm::local(const ExpertUid& uid, const torch::Tensor& input) const {
  return input.matmul(weights_.at(uid)).tanh();
}

DMoEOptions Swarm::options() const {
  return DMoEOptions(features_, grid_, "ffn")
      .k_best(4)
      .expert_dtype(torch::kDouble)
      .forward_timeout(std::chrono::milliseconds(10'000))
      .backward_timeout(std::chrono::milliseconds(10'000))
      .timeout_after_k_min(std::chrono::milliseconds(10'000));
}

DMoE Swarm::layer(const DMoEOptions& options) {
  DMoE layer(client_, options);
  layer->to(torch::kDouble);
  return layer;
}

std::vector<ExpertUid> ranked(DMoE& layer, const torch::Tensor& row, std::vector<ExpertUid> experts) {
  const torch::NoGradGuard no_grad;
  const auto logits = layer->gate->forward(row.reshape({1, -1}));
  std::stable_sort(experts.begin(), experts.end(),
                   [&](const auto& a, const auto& b) { return logit_of(logits, 0, a) > logit_of(logits, 0, b); });
  return experts;
}

torch::Tensor reference(Swarm& swarm, DMoE& layer, const torch::Tensor& input,
                        const std::vector<std::vector<ExpertUid>>& experts, const std::vector<ExpertUid>& detached) {
  const auto logits = layer->gate->forward(input);
  std::vector<torch::Tensor> rows;
  for (std::int64_t row = 0; row < input.size(0); ++row) {
    std::vector<torch::Tensor> scores;
    std::vector<torch::Tensor> outputs;
    for (const auto& uid : experts.at(static_cast<std::size_t>(row))) {
      torch::Tensor score = torch::zeros({}, input.options());
      for (std::size_t d = 0; d < logits.size(); ++d) {
        score = score + logits[d][row][static_cast<std::int64_t>(uid.coordinates[d])];
      }
      scores.push_back(score);
      auto output = swarm.local(uid, input[row]);
      if (std::find(detached.begin(), detached.end(), uid) != detached.end()) output = output.detach();
      outputs.push_back(output);
    }
    if (scores.empty()) {
      rows.push_back(torch::zeros_like(input[row]));
    } else {
      rows.push_back(torch::stack(scores).softmax(0).unsqueeze(0).matmul(torch::stack(outputs)).squeeze(0));
    }
  }
  return torch::stack(rows);
}

torch::Tensor random_input(std::int64_t rows, std::int64_t features) {
  torch::manual_seed(seed());
  return torch::randn({rows, features}, torch::kDouble);
}

}  // namespace dmoe::test
