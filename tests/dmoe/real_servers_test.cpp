// The layer with everything real: DHT over UDP, expert servers with their own experts, sockets.
#include "dmoe/client.hpp"
#include "dmoe/dmoe.hpp"
#include "dmoe/remote_expert.hpp"
#include "expert_server/server.hpp"

#include "tests/support/catch.hpp"

#include <torch/types.h>
#include <torch/utils.h>

namespace dmoe {
namespace {

using namespace std::chrono_literals;

std::unique_ptr<expert_server::Server> start_server(const std::string& pattern, std::uint16_t peer) {
  expert_server::ServerOptions options;
  options.listen = {"127.0.0.1", 0};
  if (peer != 0) options.initial_peers = {{"127.0.0.1", peer}};
  options.expert_pattern = pattern;
  options.expert.hidden_dim = 8;
  options.expert.learning_rate = 0.0;  // Forward before and after a step must agree.
  options.compute_threads = 1;
  auto server = expert_server::Server::start(std::move(options));
  if (server.has_error()) throw std::runtime_error(describe(server.error()));
  return std::move(*server);
}

struct RealSwarm {
  std::unique_ptr<expert_server::Server> first = start_server("ffn.0.[0:3]", 0);
  std::unique_ptr<expert_server::Server> second = start_server("ffn.1.[0:3]", first->port());
  std::shared_ptr<Client> client =
      Client::connect(ClientOptions().initial_peers({"127.0.0.1:" + std::to_string(first->port())}));
};

TEST_CASE("a client finds the experts of real servers through the DHT", "[dmoe][e2e]") {
  RealSwarm swarm;
  const auto experts = swarm.client->list_experts("ffn", 2);
  CHECK(experts.size() == 6);
  RemoteExpert expert(swarm.client, "ffn.1.2");
  const auto info = expert->info();
  CHECK(info.uid == "ffn.1.2");
  CHECK(info.architecture == "ffn");
  REQUIRE(info.inputs.size() == 1);
  CHECK(info.inputs[0].shape == std::vector<std::int64_t>{8});
}

TEST_CASE("outputs and gradients of real servers equal those of their experts one by one", "[dmoe][c17][e2e]") {
  torch::manual_seed(static_cast<std::uint64_t>(test::seed()));
  RealSwarm swarm;
  DMoE layer(swarm.client, DMoEOptions(8, {2, 3}, "ffn").k_best(6));
  auto input = torch::randn({5, 8}).requires_grad_();
  const auto output = layer->forward(input);
  output.pow(2).sum().backward();
  const auto input_grad = input.grad().clone();
  const auto gate_grad = layer->gate->projection->weight.grad().clone();
  layer->zero_grad();
  input.mutable_grad() = torch::Tensor();

  const auto logits = layer->gate->forward(input);
  std::vector<torch::Tensor> outputs;
  std::vector<torch::Tensor> scores;
  for (std::int64_t i = 0; i < 2; ++i) {
    for (std::int64_t j = 0; j < 3; ++j) {
      RemoteExpert expert(swarm.client, "ffn." + std::to_string(i) + "." + std::to_string(j));
      outputs.push_back(expert->forward(input));
      scores.push_back(logits[0].select(1, i) + logits[1].select(1, j));
    }
  }
  const auto expected = torch::stack(scores, 1).softmax(1).unsqueeze(1).bmm(torch::stack(outputs, 1)).squeeze(1);
  CHECK(torch::allclose(output, expected, 1e-4, 1e-5));
  expected.pow(2).sum().backward();
  CHECK(torch::allclose(input_grad, input.grad(), 1e-3, 1e-5));
  CHECK(torch::allclose(gate_grad, layer->gate->projection->weight.grad(), 1e-3, 1e-5));
}

TEST_CASE("training goes on when a real server stops", "[dmoe][b25][e2e]") {
  RealSwarm swarm;
  DMoE layer(swarm.client, DMoEOptions(8, {2, 3}, "ffn").k_best(2));
  const auto input = torch::randn({16, 8});
  layer->forward(input).sum().backward();
  swarm.second->stop();
  for (int i = 0; i < 3; ++i) layer->forward(input).sum().backward();
  CHECK(layer->stats().forwards == 4);
  CHECK(layer->stats().rows_dropped == 0);
}

TEST_CASE("a client whose initial peers are all dead says so for each", "[dmoe][b6]") {
  // A port that was free a moment ago.
  auto server = start_server("ffn.0", 0);
  const auto port = server->port();
  server.reset();
  try {
    Client::connect(ClientOptions().initial_peers({"127.0.0.1:" + std::to_string(port)}).join_timeout(300ms));
    FAIL("no error");
  } catch (const Exception& error) {
    CHECK(error.code() == Errc::kUnavailable);
    CHECK(std::string(error.what()).find(std::to_string(port)) != std::string::npos);
  }
  CHECK_THROWS_AS(Client::connect(ClientOptions()), Exception);
  CHECK_THROWS_AS(Client::connect(ClientOptions().initial_peers({"no port"})), Exception);
}

}  // namespace
}  // namespace dmoe
