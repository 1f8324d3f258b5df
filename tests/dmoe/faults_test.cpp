// What a layer does when servers fail.
#include "dmoe/server_health.hpp"
#include "gating/ban_list.hpp"
#include "tests/dmoe/swarm.hpp"

#include "tests/support/catch.hpp"

#include <algorithm>

namespace dmoe {
namespace {

using namespace std::chrono_literals;
using test::Fault;
using test::random_input;
using test::ranked;
using test::Swarm;

Errc code_of(DMoE& layer, const torch::Tensor& input, std::string* message = nullptr) {
  try {
    layer->forward(input);
  } catch (const Exception& error) {
    if (message != nullptr) *message = error.what();
    return error.code();
  }
  FAIL("no error");
  return Errc::kInternal;
}

TEST_CASE("a row whose experts are all silent is zero and the others are exact", "[dmoe][c3]") {
  Swarm swarm(4, {4}, 4);
  auto layer =
      swarm.layer(swarm.options().k_best(1).allow_zero_outputs(true).forward_timeout(300ms).timeout_after_k_min(50ms));
  auto input = random_input(8, 4).requires_grad_();
  const auto silent = ranked(layer, input[3], swarm.experts()).front();
  swarm.host_of(silent).set_fault(silent, Fault::kSilent, Fault::kNone);
  const auto output = layer->forward(input);
  std::size_t dropped = 0;
  for (std::int64_t row = 0; row < 8; ++row) {
    const auto best = ranked(layer, input[row], swarm.experts()).front();
    const auto expected = best == silent ? torch::zeros({4}, torch::kDouble) : swarm.local(best, input[row]);
    CHECK(torch::allclose(output[row], expected, 1e-9, 1e-12));
    dropped += best == silent ? 1U : 0U;
  }
  CHECK(layer->stats().rows_dropped == dropped);
  output.sum().backward();
  CHECK(input.grad().isfinite().all().item<bool>());
  CHECK(torch::equal(input.grad()[3], torch::zeros({4}, torch::kDouble)));
  CHECK(layer->gate->projection->weight.grad().isfinite().all().item<bool>());
}

TEST_CASE("without zero outputs the error names the row its experts and what they did", "[dmoe][c3]") {
  Swarm swarm(1, {2}, 4);
  auto layer = swarm.layer(swarm.options().forward_timeout(200ms));
  swarm.host(0).set_fault(Fault::kSilent, Fault::kNone);
  std::string message;
  CHECK(code_of(layer, random_input(3, 4), &message) == Errc::kDeadlineExceeded);
  CHECK(message.find("row 0 of 3, grid 'ffn' of 2") != std::string::npos);
  CHECK(message.find("ffn.1 on 127.0.0.1:") != std::string::npos);
}

TEST_CASE("an expert that answers NaN is a failed expert", "[dmoe][c4]") {
  Swarm swarm(2, {4}, 4);
  auto layer = swarm.layer(swarm.options());
  const ExpertUid broken{"ffn", {1}};
  swarm.host_of(broken).set_fault(broken, Fault::kNaN, Fault::kNone);
  const auto input = random_input(4, 4);
  const std::vector<std::vector<ExpertUid>> rest(4, {{"ffn", {0}}, {"ffn", {2}}, {"ffn", {3}}});
  CHECK(torch::allclose(layer->forward(input), reference(swarm, layer, input, rest), 1e-9, 1e-12));
  const auto calls = layer->last_call();
  const auto it = std::find_if(calls.begin(), calls.end(), [&](const auto& call) { return call.uid == broken; });
  REQUIRE(it != calls.end());
  CHECK_FALSE(it->answered);
  CHECK(it->message.find("NaN") != std::string::npos);
}

TEST_CASE("rows that lost their experts get the next best within the same pass", "[dmoe][b25]") {
  Swarm swarm(2, {8}, 4);
  auto layer = swarm.layer(swarm.options().k_best(2).k_min(2));
  const auto input = random_input(16, 4);
  swarm.host(1).kill();
  const auto output = layer->forward(input);
  std::vector<std::vector<ExpertUid>> experts;
  for (std::int64_t row = 0; row < 16; ++row) {
    auto& alive = experts.emplace_back();
    for (const auto& uid : ranked(layer, input[row], swarm.experts())) {
      if (uid.coordinates[0] % 2 == 0 && alive.size() < 2) alive.push_back(uid);
    }
  }
  CHECK(torch::allclose(output, reference(swarm, layer, input, experts), 1e-9, 1e-12));
}

TEST_CASE("a replacement that fails is replaced in turn", "[dmoe][b25]") {
  Swarm swarm(2, {8}, 4);
  auto layer = swarm.layer(swarm.options().k_best(2).k_min(2));
  const auto input = random_input(1, 4);
  const auto best = ranked(layer, input[0], swarm.experts());
  for (const auto failing : {0, 2, 3})
    swarm.host_of(best[failing]).set_fault(best[failing], Fault::kError, Fault::kNone);
  const auto output = layer->forward(input);
  CHECK(torch::allclose(output, reference(swarm, layer, input, {{best[1], best[4]}}), 1e-9, 1e-12));
}

TEST_CASE("a killed server is asked once and then left alone", "[dmoe][b25]") {
  Swarm swarm(2, {8}, 4);
  auto layer = swarm.layer(swarm.options());
  const auto input = random_input(16, 4);
  (void)layer->forward(input);
  swarm.host(1).kill();
  (void)layer->forward(input);
  const auto failed = layer->stats().failed_calls;
  CHECK(failed > 0);
  CHECK(layer->stats().failed(Errc::kUnavailable) == failed);
  for (int i = 0; i < 10; ++i) (void)layer->forward(input);
  CHECK(layer->stats().failed_calls == failed);
}

TEST_CASE("a hung server costs one grace time and is then left alone", "[dmoe][b25]") {
  Swarm swarm(2, {8}, 4);
  auto layer = swarm.layer(swarm.options().k_best(8).timeout_after_k_min(200ms));
  const auto input = random_input(16, 4);
  (void)layer->forward(input);
  swarm.host(1).hang();
  (void)layer->forward(input);
  const auto failed = layer->stats().failed(Errc::kDeadlineExceeded);
  CHECK(failed > 0);
  for (int i = 0; i < 5; ++i) (void)layer->forward(input);
  CHECK(layer->stats().failed(Errc::kDeadlineExceeded) == failed);
}

TEST_CASE("a server is used again when it announces itself anew", "[dmoe][b25]") {
  Swarm swarm(2, {2}, 4);
  const auto client = Client::with_resolver(std::shared_ptr<dht::PrefixResolver>(&swarm.directory(), [](auto*) {}),
                                            ClientOptions().ban_time(std::chrono::hours(1)).directory_ttl(1ms));
  DMoE layer(client, swarm.options().timeout_after_k_min(150ms));
  layer->to(torch::kDouble);
  const auto input = random_input(4, 4);
  swarm.host(1).hang();
  (void)layer->forward(input);
  swarm.host(1).hang(false);
  swarm.directory().add({"ffn", {1}}, swarm.host(1).address(2));
  while (swarm.host(1).forwards({"ffn", {1}}) == 0) (void)layer->forward(input);
}

TEST_CASE("a server is used again when it answers in the background", "[dmoe][b25]") {
  Swarm swarm(2, {2}, 4);
  const auto client = Client::with_resolver(std::shared_ptr<dht::PrefixResolver>(&swarm.directory(), [](auto*) {}),
                                            ClientOptions().ban_time(2s));
  DMoE layer(client, swarm.options().timeout_after_k_min(150ms));
  layer->to(torch::kDouble);
  const auto input = random_input(4, 4);
  swarm.host(1).hang();
  (void)layer->forward(input);
  swarm.host(1).hang(false);
  while (swarm.host(1).forwards({"ffn", {1}}) == 0) (void)layer->forward(input);
}

TEST_CASE("the caller's own mistakes ban nobody", "[dmoe][c19]") {
  Swarm swarm(2, {4}, 4);
  auto layer = swarm.layer(swarm.options());
  const auto input = random_input(4, 4);
  for (std::size_t i = 0; i < 2; ++i) swarm.host(i).set_fault(Fault::kRefuse, Fault::kNone);
  for (int i = 0; i < 10; ++i) CHECK(code_of(layer, input) == Errc::kInvalidArgument);
  CHECK(swarm.client()->health().bans()->view(std::chrono::steady_clock::now())->empty());
  for (std::size_t i = 0; i < 2; ++i) swarm.host(i).set_fault(Fault::kNone, Fault::kNone);
  CHECK(layer->forward(input).size(0) == 4);
}

TEST_CASE("a layer whose grid has too few dimensions is told so", "[dmoe][c1]") {
  Swarm swarm(1, {2, 2}, 4);
  auto options = swarm.options();
  options.grid({2});
  auto layer = swarm.layer(options);
  for (std::uint32_t i = 0; i < 2; ++i) swarm.directory().add({"ffn", {i}}, swarm.host(0).address());
  std::string message;
  CHECK(code_of(layer, random_input(3, 4), &message) == Errc::kNotFound);
  CHECK(message.find("is the servers' grid one of 1 dimensions?") != std::string::npos);
}

TEST_CASE("a refusal beside another failure may pass and is not reported as the caller's mistake", "[dmoe][c19]") {
  Swarm swarm(2, {2}, 4);
  auto layer = swarm.layer(swarm.options().k_best(2).forward_timeout(200ms));
  const auto input = random_input(2, 4);
  for (const auto& [refuses, silent] : {std::pair{0, 1}, std::pair{1, 0}}) {
    swarm.host(static_cast<std::size_t>(refuses)).set_fault(Fault::kRefuse, Fault::kNone);
    swarm.host(static_cast<std::size_t>(silent)).set_fault(Fault::kError, Fault::kNone);
    CHECK(code_of(layer, input) == Errc::kInternal);
  }
}

TEST_CASE("when all servers are banned they are tried anyway", "[dmoe][c19]") {
  Swarm swarm(2, {4}, 4);
  auto layer = swarm.layer(swarm.options());
  const auto input = random_input(4, 4);
  for (std::size_t i = 0; i < 2; ++i) {
    swarm.client()->health().bans()->ban_server(swarm.host(i).address(), std::chrono::steady_clock::now());
  }
  CHECK(layer->forward(input).size(0) == 4);
}

TEST_CASE("an expert of another width fails with both shapes", "[dmoe][c26]") {
  Swarm swarm(1, {2}, 4);
  auto layer = swarm.layer(swarm.options());
  const auto input = random_input(3, 4);
  (void)layer->forward(input);
  for (const auto& uid : swarm.experts()) {
    swarm.host(0).host(uid, [](const test::Tensors& inputs) -> test::Tensors { return {inputs[0].slice(1, 0, 2)}; });
  }
  std::string message;
  CHECK(code_of(layer, input, &message) == Errc::kInternal);
  CHECK(message.find("[3, 2]") != std::string::npos);
  CHECK(message.find("[3, 4]") != std::string::npos);
}

TEST_CASE("a dead endpoint is passed over for the server's next one", "[dmoe][c20]") {
  Swarm swarm(1, {2}, 4);
  auto address = swarm.host(0).address(2);
  test::ExpertHost gone(9);
  const auto dead = gone.address().endpoints.front();
  gone.kill();
  address.endpoints.insert(address.endpoints.begin(), dead);
  for (const auto& uid : swarm.experts()) swarm.directory().add(uid, address);
  auto layer = swarm.layer(swarm.options().allow_zero_outputs(true));
  const auto input = random_input(3, 4);
  (void)layer->forward(input);
  CHECK(layer->stats().failed(Errc::kUnavailable) > 0);
  const auto output = layer->forward(input);
  const std::vector<std::vector<ExpertUid>> all(3, swarm.experts());
  CHECK(torch::allclose(output, reference(swarm, layer, input, all), 1e-9, 1e-12));
}

TEST_CASE("trainers with different batches do not wait for each other", "[dmoe][c28]") {
  Swarm swarm(2, {4}, 4);
  auto layer = swarm.layer(swarm.options());
  std::vector<std::thread> threads;
  for (std::int64_t rows : {1, 3, 17, 64}) {
    threads.emplace_back([&layer, rows] {
      for (int i = 0; i < 5; ++i) layer->forward(torch::randn({rows, 4}, torch::kDouble)).sum().backward();
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(layer->stats().forwards == 20);
  CHECK(layer->stats().backwards == 20);
  CHECK(layer->stats().failed_calls == 0);
}

}  // namespace
}  // namespace dmoe
