// What a layer must stand again and again.
#include "expert_server/server.hpp"
#include "tests/dmoe/swarm.hpp"
#include "tests/support/catch.hpp"

#include <fstream>
#include <string>

namespace dmoe {
namespace {

using namespace std::chrono_literals;
using test::random_input;
using test::Swarm;

/// Of this process, in MiB.
double resident_memory() {
  std::ifstream status("/proc/self/statm");
  double pages = 0;
  double resident = 0;
  status >> pages >> resident;
  return resident * 4'096 / (1 << 20);
}

TEST_CASE("a thousand forwards that nobody differentiates keep no memory and send nothing back", "[dmoe][c8]") {
  expert_server::ServerOptions options;
  options.listen = {"127.0.0.1", 0};
  options.expert_pattern = "nop.[0:4]";
  options.expert.architecture = "nop";
  options.expert.hidden_dim = 512;
  const auto server = expert_server::Server::start(std::move(options));
  REQUIRE(server.has_value());
  const auto client =
      Client::connect(ClientOptions().initial_peers({"127.0.0.1:" + std::to_string((*server)->port())}));
  DMoE layer(client, DMoEOptions(512, {4}, "nop"));
  const auto input = torch::randn({64, 512});  // Inputs and answers of one pass: 1 MiB.
  const auto pass = [&](int i) {
    if (i % 2 == 0) {
      const torch::NoGradGuard no_grad;
      (void)layer->forward(input);
    } else {
      (void)layer->forward(input).detach();
    }
  };
  for (int i = 0; i < 300; ++i) pass(i);
  const double before = resident_memory();
  for (int i = 0; i < 1'000; ++i) pass(i);
  CHECK(resident_memory() - before < 40);
  CHECK(layer->stats().forwards == 1'300);
  CHECK(layer->stats().backwards == 0);
  CHECK(layer->stats().calls == 4 * 1'300);  // All of them forward.
}

TEST_CASE("a hundred servers killed between forward and backward cost their gradients only", "[dmoe][c18]") {
  for (int round = 0; round < 100; ++round) {
    Swarm swarm(2, {2}, 4);
    auto layer = swarm.layer(swarm.options());
    auto input = random_input(2, 4).requires_grad_();
    const auto output = layer->forward(input);
    swarm.host(1).kill();
    output.sum().backward();
    REQUIRE(input.grad().isfinite().all().item<bool>());
    REQUIRE(swarm.host(0).backwards({"ffn", {0}}) == 1);
    REQUIRE(layer->stats().failed(Errc::kUnavailable) == 1);
    REQUIRE(layer->stats().backwards == 1);
  }
}

TEST_CASE("rows use whichever of one to eight experts live", "[dmoe][c2]") {
  const auto input = random_input(6, 4);
  const torch::NoGradGuard no_grad;
  for (std::size_t live = 1; live <= 8; ++live) {
    Swarm fewer(1, {static_cast<std::int64_t>(live)}, 4);
    auto narrow = fewer.layer(fewer.options().k_best(8));
    const std::vector<std::vector<ExpertUid>> all(6, fewer.experts());
    CHECK(torch::allclose(narrow->forward(input), reference(fewer, narrow, input, all), 1e-9, 1e-12));
  }
}

TEST_CASE("every type of the wire travels beside its rows unchanged", "[dmoe][c11][c12]") {
  Swarm swarm(1, {1}, 4);
  const ExpertUid uid{"ffn", {0}};
  auto layer = swarm.layer(swarm.options());
  auto input = random_input(5, 4).requires_grad_();
  for (const auto dtype : {torch::kBool, torch::kUInt8, torch::kInt32, torch::kInt64}) {
    const auto mask = torch::randint(0, 2, {5, 3}).to(dtype);
    layer->forward_with(input, {mask}).sum().backward();
    REQUIRE(swarm.host(0).last_inputs(uid).size() == 2);
    CHECK(swarm.host(0).last_inputs(uid)[1].scalar_type() == dtype);
    CHECK(torch::equal(swarm.host(0).last_inputs(uid)[1], mask));
  }
  for (const auto dtype : {torch::kHalf, torch::kBFloat16, torch::kFloat, torch::kDouble}) {
    auto extra = torch::randn({5, 3}).to(dtype).requires_grad_();
    layer->forward_with(input, {extra}).sum().backward();
    CHECK(swarm.host(0).last_inputs(uid)[1].scalar_type() == torch::kDouble);  // What the experts take.
    CHECK(extra.grad().scalar_type() == dtype);
  }
}

}  // namespace
}  // namespace dmoe
