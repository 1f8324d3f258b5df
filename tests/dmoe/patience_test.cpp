// How long a layer waits for those who are slower than they usually are.
#include "dmoe/usual_times.hpp"
#include "tests/dmoe/swarm.hpp"

#include "tests/support/catch.hpp"

#include <thread>

namespace dmoe {
namespace {

using namespace std::chrono_literals;
using test::Fault;
using test::random_input;
using test::Swarm;

const ExpertUid kSteady{"ffn", {1}};

TEST_CASE("what an expert usually takes is known after some calls and follows the latest", "[dmoe]") {
  UsualTimes times;
  for (std::size_t i = 1; i < UsualTimes::kEnough; ++i) times.answered(kSteady, 10ms);
  CHECK_FALSE(times.usual(kSteady).has_value());
  times.answered(kSteady, 10ms);
  CHECK(times.usual(kSteady) == 10ms);
  CHECK_FALSE(times.usual({"ffn", {2}}).has_value());
  for (std::size_t i = 0; i < UsualTimes::kWindow; ++i) times.answered(kSteady, 30ms);
  CHECK(times.usual(kSteady) == 30ms);
}

TEST_CASE("a lost answer in ten does not change what is usual and one in three does", "[dmoe]") {
  UsualTimes rarely;
  UsualTimes often;
  for (int i = 0; i < 100; ++i) {
    i % 10 == 0 ? rarely.given_up(kSteady, 15ms) : rarely.answered(kSteady, 10ms);
    i % 3 == 0 ? often.given_up(kSteady, 15ms) : often.answered(kSteady, 10ms);
  }
  CHECK(rarely.usual(kSteady) == 10ms);
  CHECK(often.usual(kSteady) == 30ms);
}

TEST_CASE("an expert that stops to answer does not hold up passes for all of the grace time", "[dmoe][b25]") {
  Swarm swarm(1, {4}, 4);
  // With these limits a pass that waited for all of them would not end.
  auto layer =
      swarm.layer(swarm.options().k_best(4).forward_timeout(24h).backward_timeout(24h).timeout_after_k_min(24h));
  const auto input = random_input(8, 4);
  for (std::size_t i = 0; i < UsualTimes::kEnough; ++i) layer->forward(input).sum().backward();
  CHECK(layer->stats().failed_calls == 0);
  swarm.host(0).set_fault(swarm.experts()[1], Fault::kNone, Fault::kSilent);
  layer->forward(input).sum().backward();
  swarm.host(0).set_fault(swarm.experts()[1], Fault::kSilent, Fault::kSilent);
  layer->forward(input).sum().backward();
  CHECK(layer->stats().failed(Errc::kDeadlineExceeded) == 2);
}

TEST_CASE("rows whose only expert stops to answer get the next best one before the deadline", "[dmoe][b25]") {
  Swarm swarm(1, {4}, 4);
  auto layer =
      swarm.layer(swarm.options().k_best(1).forward_timeout(24h).backward_timeout(24h).timeout_after_k_min(100ms));
  const auto input = random_input(1, 4);
  const auto best = test::ranked(layer, input[0], swarm.experts());
  for (std::size_t i = 0; i < UsualTimes::kEnough; ++i) layer->forward(input).sum().backward();
  swarm.host(0).set_fault(best[0], Fault::kNone, Fault::kSilent);
  layer->forward(input).sum().backward();  // Nobody else can give this gradient: it is zero, and the pass ends.
  CHECK(layer->stats().failed(Errc::kDeadlineExceeded) == 1);
  swarm.host(0).set_fault(best[0], Fault::kSilent, Fault::kSilent);
  const auto output = layer->forward(input);
  CHECK(torch::allclose(output[0], swarm.local(best[1], input[0]), 1e-9, 1e-12));
  CHECK(layer->stats().rows_dropped == 0);
}

TEST_CASE("an expert that always takes longer than others is waited for", "[dmoe][c20]") {
  Swarm swarm(2, {4}, 4);
  auto layer = swarm.layer(swarm.options().k_best(4).straggler_patience(20));
  const auto slow = swarm.experts().front();
  swarm.host_of(slow).host(slow, [&](const test::Tensors& inputs) -> test::Tensors {
    std::this_thread::sleep_for(60ms);  // What it computes takes long.
    return {swarm.local(slow, inputs[0])};
  });
  const auto input = random_input(2, 4);
  for (std::size_t i = 0; i < 2 * UsualTimes::kEnough; ++i) (void)layer->forward(input);
  CHECK(layer->stats().failed_calls == 0);
}

}  // namespace
}  // namespace dmoe
