// Compression of what layers send: agreed with the server, in both directions and both passes.
#include "dmoe/dmoe.hpp"
#include "dmoe/remote_expert.hpp"
#include "expert_server/server.hpp"
#include "tests/dmoe/swarm.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"
#include "tests/support/text.hpp"

#include <torch/types.h>
#include <torch/utils.h>
#include <algorithm>

#include <algorithm>
#include <chrono>
#include <sstream>

namespace dmoe {
namespace {

using namespace std::chrono_literals;

constexpr std::int64_t kFeatures = 64;

/// A real server of two experts that stay as they are, and a client that knows it.
struct Frozen {
  Frozen() {
    expert_server::ServerOptions options;
    options.listen = {"127.0.0.1", 0};
    options.expert_pattern = "ffn.[0:2]";
    options.expert.hidden_dim = kFeatures;
    options.expert.learning_rate = 0.0;
    options.compute_threads = 1;
    auto started = expert_server::Server::start(std::move(options));
    if (started.has_error()) throw std::runtime_error(describe(started.error()));
    server = std::move(*started);
    client = Client::connect(ClientOptions().initial_peers({"127.0.0.1:" + std::to_string(server->port())}));
  }

  std::unique_ptr<expert_server::Server> server;
  std::shared_ptr<Client> client;
};

std::uint64_t bytes_of(Compression compression, std::int64_t values) {
  const auto count = static_cast<std::uint64_t>(values);
  if (compression == Compression::kNone) return 4 * count;
  return compression == Compression::kInt8 ? count + 4 * ((count + 127) / 128) : 2 * count;
}

/// How far a two-layer expert may carry an error of its input's format, as measured with room.
double tolerance(Compression compression) {
  switch (compression) {
    case Compression::kNone: return 1e-6;
    case Compression::kFloat16: return 0.01;
    case Compression::kBfloat16: return 0.05;
    case Compression::kInt8: return 0.1;
  }
  return 0;
}

double distance(const torch::Tensor& a, const torch::Tensor& b) { return ((a - b).norm() / b.norm()).item<double>(); }

TEST_CASE("a remote expert answers alike with every compression and in backward too", "[compression][e2e]") {
  torch::manual_seed(test::seed());
  Frozen swarm;
  const auto values = torch::randn({16, kFeatures});
  const auto grad = torch::randn({16, kFeatures});
  torch::Tensor exact;
  torch::Tensor exact_grad;
  for (const auto compression : kCompressions) {
    RemoteExpert expert(swarm.client, "ffn.0", RemoteExpertOptions().compression(compression));
    const auto input = values.clone().requires_grad_();
    const auto output = expert->forward(input);
    output.backward(grad);
    INFO(to_string(compression));
    CHECK(output.scalar_type() == torch::kFloat32);
    if (compression == Compression::kNone) {
      exact = output.detach();
      exact_grad = input.grad();
      continue;
    }
    CHECK(distance(output.detach(), exact) < tolerance(compression));
    CHECK(distance(input.grad(), exact_grad) < 2 * tolerance(compression));
    CHECK_FALSE(torch::equal(output.detach(), exact));  // It was compressed.
  }
}

TEST_CASE("a server says which compressions it reads", "[compression][e2e]") {
  Frozen swarm;
  const auto info = RemoteExpert(swarm.client, "ffn.1")->info();
  CHECK(std::equal(info.compressions.begin(), info.compressions.end(), kCompressions.begin(), kCompressions.end()));
}

TEST_CASE("a layer compresses rows and gradients once it knows that the server reads it", "[compression][e2e]") {
  torch::manual_seed(test::seed());
  Frozen swarm;
  constexpr std::int64_t kRows = 10;
  const auto values = torch::randn({kRows, kFeatures});
  for (const auto compression : kCompressions) {
    INFO(to_string(compression));
    DMoE plain(swarm.client, DMoEOptions(kFeatures, {2}, "ffn").k_best(2));
    DMoE layer(swarm.client, DMoEOptions(kFeatures, {2}, "ffn").k_best(2).compression(compression));
    {
      const torch::NoGradGuard no_grad;
      layer->gate->projection->weight.copy_(plain->gate->projection->weight);
      if (plain->gate->projection->bias.defined()) layer->gate->projection->bias.copy_(plain->gate->projection->bias);
    }
    const auto reference = values.clone().requires_grad_();
    const auto exact = plain->forward(reference);
    exact.pow(2).sum().backward();

    const auto expected = bytes_of(compression, kRows * kFeatures);  // Every row goes to both experts.
    const auto limit = std::chrono::steady_clock::now() + 30s;
    torch::Tensor input;
    torch::Tensor output;
    do {  // The first calls may leave before the server's answer to the question has come.
      input = values.clone().requires_grad_();
      output = layer->forward(input);
    } while (layer->last_call().front().bytes_sent != expected && std::chrono::steady_clock::now() < limit);
    for (const auto& call : layer->last_call()) {
      CHECK(call.bytes_sent == expected);
      CHECK(call.bytes_received == expected);
    }
    output.pow(2).sum().backward();
    CHECK(distance(output.detach(), exact.detach()) <= tolerance(compression));
    CHECK(distance(input.grad(), reference.grad()) <= 2 * tolerance(compression));
    std::size_t backward_calls = 0;
    for (const auto& call : layer->last_call()) {
      if (!call.backward) continue;
      ++backward_calls;
      CHECK(call.bytes_sent == 2 * expected);  // Inputs and gradients.
      CHECK(call.bytes_received == expected);
    }
    CHECK(backward_calls == 2);
  }
}

TEST_CASE("e19 a server that does not speak of compression gets none", "[compression][e19]") {
  test::Swarm swarm(1, {1}, 4);  // Its hosts answer `info` as servers did before there was compression.
  const auto uid = swarm.experts().front();
  swarm.host(0).host(uid, [](const test::Tensors& inputs) { return test::Tensors{inputs[0] * 2}; });
  swarm.host(0).describe(uid, {{4}}, {{4}});
  const auto values = torch::randn({5, 4});
  RemoteExpert expert(swarm.client(), uid, RemoteExpertOptions().compression(Compression::kInt8));
  CHECK(torch::equal(expert->forward(values), values * 2));
  DMoE layer(swarm.client(), DMoEOptions(4, {1}, "ffn").k_best(1).compression(Compression::kInt8));
  for (int i = 0; i < 20; ++i) {
    CHECK(torch::equal(layer->forward(values).detach(), values * 2));
    CHECK(layer->last_call().front().bytes_sent == 5 * 4 * sizeof(float));
  }
}

TEST_CASE("a layer's print names its compression and names are read back", "[compression]") {
  for (const auto compression : kCompressions) {
    const auto parsed = parse_compression(to_string(compression));
    REQUIRE(parsed.has_value());
    CHECK(*parsed == compression);
  }
  const auto unknown = parse_compression("int4");
  REQUIRE(unknown.has_error());
  CHECK(test::contains(unknown.error().message, "int4"));
  CHECK(test::contains(unknown.error().message, "bfloat16"));
  test::Swarm swarm(1, {1}, 4);
  std::ostringstream text;
  DMoE layer(swarm.client(), DMoEOptions(4, {1}, "ffn").k_best(1).compression(Compression::kBfloat16));
  layer->pretty_print(text);
  CHECK(test::contains(text.str(), "compression=bfloat16"));
}

}  // namespace
}  // namespace dmoe
