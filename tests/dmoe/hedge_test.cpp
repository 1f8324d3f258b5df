// A call that takes much longer than usual gets company.
#include "dmoe/server_health.hpp"
#include "dmoe/usual_times.hpp"
#include "gating/ban_list.hpp"
#include "tests/dmoe/swarm.hpp"
#include "tests/support/catch.hpp"

#include <algorithm>
#include <thread>

namespace dmoe {
namespace {

using namespace std::chrono_literals;
using test::Fault;
using test::random_input;
using test::ranked;
using test::Swarm;

/// Waits for the second answer longer than any test takes.
DMoEOptions patient(Swarm& swarm) { return swarm.options().k_best(2).straggler_patience(0); }

/// Enough forward passes for its experts' usual times to be known, and for extra calls to be earned.
void get_used_to(Swarm& swarm, DMoE& layer, const torch::Tensor& input) {
  const torch::NoGradGuard no_grad;
  for (int i = 0; i < 200; ++i) (void)layer->forward(input);
  for (const auto& call : layer->last_call()) {
    REQUIRE(swarm.client()->usual_times(/*backward=*/false).at_most(call.uid).has_value());
  }
}

/// On a busy machine another call may be slow as well, and be hedged: then again.
torch::Tensor forward_without(DMoE& layer, const torch::Tensor& input, const ExpertUid& slow) {
  for (int attempt = 0; attempt < 100; ++attempt) {
    const auto output = layer->forward(input);
    const auto calls = layer->last_call();
    const auto as_wanted = [&](const auto& call) { return call.answered != (call.uid == slow); };
    const auto hedges = std::count_if(calls.begin(), calls.end(), [](const auto& call) { return call.hedge; });
    if (hedges > 0 && std::all_of(calls.begin(), calls.end(), as_wanted)) return output;
  }
  FAIL("never was only the slow call hedged");
  return {};
}

TEST_CASE("rows of a call that hangs are computed by their next best expert", "[dmoe][hedge][c20]") {
  Swarm swarm(3, {6}, 4);
  auto layer = swarm.layer(patient(swarm));  // Would wait 10 s for the second answer.
  auto input = random_input(1, 4);
  get_used_to(swarm, layer, input);
  const auto best = ranked(layer, input[0], swarm.experts());
  const auto slow = best[0];
  swarm.host_of(slow).set_fault(slow, Fault::kHold, Fault::kNone);
  const auto before = layer->stats();
  const auto learned = swarm.host_of(slow).backwards(slow);

  input.requires_grad_();
  const auto output = forward_without(layer, input, slow);
  CHECK(torch::allclose(output, reference(swarm, layer, input, {{best[1], best[2]}}), 1e-9, 1e-12));
  const auto after = layer->stats();
  CHECK(after.hedged_calls > before.hedged_calls);
  CHECK(after.hedges_used > before.hedges_used);
  CHECK(after.superseded_calls > before.superseded_calls);
  CHECK(after.failed_calls == before.failed_calls);
  CHECK(after.answers_dropped == before.answers_dropped);
  const auto calls = layer->last_call();
  REQUIRE(calls.size() == 3);
  CHECK(std::count_if(calls.begin(), calls.end(), [](const auto& call) { return call.hedge && call.answered; }) == 1);
  const auto it = std::find_if(calls.begin(), calls.end(), [](const auto& call) { return !call.answered; });
  REQUIRE(it != calls.end());
  CHECK(it->uid == slow);
  CHECK(it->code == Errc::kCancelled);

  // Only those whose answers count learn, from gradients of these answers.
  output.sum().backward();
  CHECK(swarm.host_of(slow).backwards(slow) == learned);
  CHECK(swarm.host_of(best[2]).backwards(best[2]) == 1);
  const auto gradient = input.grad().clone();
  input.mutable_grad().reset();
  reference(swarm, layer, input, {{best[1], best[2]}}).sum().backward();
  CHECK(torch::allclose(gradient, input.grad(), 1e-9, 1e-12));
  swarm.host_of(slow).release_held();
}

TEST_CASE("with hedging only the rows that the slow expert owes change hands", "[dmoe][hedge]") {
  Swarm swarm(4, {8}, 4);
  auto layer = swarm.layer(patient(swarm).hedge_share(1));
  auto input = random_input(12, 4);
  get_used_to(swarm, layer, input);
  const auto slow = ranked(layer, input[0], swarm.experts())[1];
  swarm.host_of(slow).set_fault(slow, Fault::kHold, Fault::kNone);
  std::vector<std::vector<ExpertUid>> experts;
  for (std::int64_t row = 0; row < 12; ++row) {
    auto best = ranked(layer, input[row], swarm.experts());
    best.resize(3);
    const auto owed = std::find(best.begin(), best.begin() + 2, slow);
    if (owed != best.begin() + 2) {
      best.erase(owed);
    } else {
      best.pop_back();
    }
    experts.push_back(best);
  }
  input.requires_grad_();
  const auto output = forward_without(layer, input, slow);
  CHECK(torch::allclose(output, reference(swarm, layer, input, experts), 1e-9, 1e-12));
  output.sum().backward();
  const auto gradient = input.grad().clone();
  input.mutable_grad().reset();
  reference(swarm, layer, input, experts).sum().backward();
  CHECK(torch::allclose(gradient, input.grad(), 1e-9, 1e-12));
  swarm.host_of(slow).release_held();
}

TEST_CASE("the slow answer counts when its hedge is slower still", "[dmoe][hedge]") {
  Swarm swarm(3, {3}, 4);
  auto layer = swarm.layer(patient(swarm));
  const auto input = random_input(1, 4);
  get_used_to(swarm, layer, input);
  const auto best = ranked(layer, input[0], swarm.experts());
  swarm.host_of(best[0]).set_fault(best[0], Fault::kHold, Fault::kNone);
  swarm.host_of(best[2]).set_fault(best[2], Fault::kHold, Fault::kNone);
  const auto before = layer->stats();
  auto output = layer->forward_async(input);
  swarm.host_of(best[2]).wait_for_held(1);  // The hedge is out.
  swarm.host_of(best[0]).release_held();
  CHECK(torch::allclose(output.get(), reference(swarm, layer, input, {{best[0], best[1]}}), 1e-9, 1e-12));
  CHECK(layer->stats().hedged_calls - before.hedged_calls == 1);
  CHECK(layer->stats().hedges_used == before.hedges_used);
  swarm.host_of(best[2]).release_held();
}

TEST_CASE("a hedge that fails leaves the slow call to be waited for", "[dmoe][hedge]") {
  Swarm swarm(3, {3}, 4);
  auto layer = swarm.layer(patient(swarm));
  const auto input = random_input(1, 4);
  get_used_to(swarm, layer, input);
  const auto best = ranked(layer, input[0], swarm.experts());
  swarm.host_of(best[0]).set_fault(best[0], Fault::kHold, Fault::kNone);
  swarm.host_of(best[2]).set_fault(best[2], Fault::kError, Fault::kNone);
  const auto before = layer->stats();
  auto output = layer->forward_async(input);
  while (layer->client()->health().bans()->view(std::chrono::steady_clock::now())->empty()) std::this_thread::yield();
  swarm.host_of(best[0]).release_held();
  CHECK(torch::allclose(output.get(), reference(swarm, layer, input, {{best[0], best[1]}}), 1e-9, 1e-12));
  CHECK(layer->stats().failed_calls - before.failed_calls == 1);
}

TEST_CASE("hedging can be switched off and never costs more than its share", "[dmoe][hedge]") {
  Swarm swarm(2, {6}, 4);
  auto layer = swarm.layer(patient(swarm).hedge_share(0).timeout_after_k_min(300ms));
  auto hedging = swarm.layer(patient(swarm).hedge_share(0.05).timeout_after_k_min(300ms));
  hedging->gate = layer->gate;
  const auto input = random_input(1, 4);
  get_used_to(swarm, hedging, input);
  const auto best = ranked(layer, input[0], swarm.experts());
  swarm.host_of(best[0]).set_fault(best[0], Fault::kHold, Fault::kNone);
  (void)layer->forward(input);
  CHECK(layer->stats().hedged_calls == 0);
  CHECK(layer->stats().answers_dropped == 1);
  swarm.host_of(best[0]).release_held();

  const auto stats = hedging->stats();
  CHECK(static_cast<double>(stats.hedged_calls) <= 0.05 * static_cast<double>(stats.calls));
  CHECK_THROWS_AS(swarm.layer(swarm.options().hedge_share(-0.1)), Exception);
}

}  // namespace
}  // namespace dmoe
