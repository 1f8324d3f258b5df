// What a missing answer says about an expert.
#include "dmoe/lost_calls.hpp"
#include "dmoe/server_health.hpp"
#include "gating/ban_list.hpp"
#include "tests/dmoe/swarm.hpp"

#include "tests/support/catch.hpp"

namespace dmoe {
namespace {

using namespace std::chrono_literals;
using test::Fault;
using test::Swarm;

const LostCalls::TimePoint kStart = LostCalls::TimePoint{} + 1h;

TEST_CASE("an expert that answers between its losses is not stuck", "[dmoe]") {
  LostCalls calls;
  const ExpertUid uid{"ffn", {1}};
  for (auto now = kStart; now < kStart + 1min; now += 700ms) {
    CHECK_FALSE(calls.lost(uid, {}, true, now));
    CHECK_FALSE(calls.lost(uid, {}, true, now + 100ms));
    calls.answered(uid, {});
  }
  CHECK(calls.size() == 0);
}

TEST_CASE("an expert that has not answered for a while is stuck from its second loss", "[dmoe]") {
  LostCalls calls;
  const ExpertUid stuck{"ffn", {1}};
  const ExpertUid slow{"ffn", {2}};
  CHECK_FALSE(calls.lost(stuck, {}, true, kStart));
  CHECK_FALSE(calls.lost(stuck, {}, true, kStart + 900ms));  // Steps in flight together lose theirs together.
  CHECK_FALSE(calls.lost(slow, {}, true, kStart + 5s));
  CHECK(calls.lost(stuck, {}, true, kStart + 1s));
}

TEST_CASE("calls that were not waited for long say less than those that were", "[dmoe]") {
  LostCalls calls;
  const ExpertUid uid{"ffn", {1}};
  for (int i = 0; i < 5; ++i) CHECK_FALSE(calls.lost(uid, {}, false, kStart + i * 300ms));
  CHECK(calls.lost(uid, {}, false, kStart + 1500ms));
}

TEST_CASE("the losses that are remembered are bounded", "[dmoe]") {
  LostCalls calls;
  for (std::size_t i = 0; i < LostCalls::kMost + 100; ++i) {
    (void)calls.lost({"ffn", {static_cast<Coordinate>(i)}}, {}, true, kStart + std::chrono::seconds(i));
  }
  CHECK(calls.size() <= LostCalls::kMost);
}

TEST_CASE("an expert that lost one call is asked again and one that is stuck is left alone", "[dmoe][b25]") {
  Swarm swarm(1, {4}, 4);
  auto layer = swarm.layer(swarm.options().k_best(4).timeout_after_k_min(500ms));
  const auto input = test::random_input(4, 4);
  const auto uid = swarm.experts().front();
  (void)layer->forward(input);
  swarm.host(0).set_fault(uid, Fault::kSilent, Fault::kNone);
  (void)layer->forward(input);
  CHECK(layer->stats().failed(Errc::kDeadlineExceeded) == 1);
  CHECK(swarm.client()->health().bans()->view(std::chrono::steady_clock::now())->empty());
  while (swarm.client()->health().bans()->view(std::chrono::steady_clock::now())->empty()) (void)layer->forward(input);
  const auto lost = layer->stats().failed(Errc::kDeadlineExceeded);
  CHECK(lost >= 2);
  (void)layer->forward(input);
  CHECK(layer->stats().failed(Errc::kDeadlineExceeded) == lost);
}

}  // namespace
}  // namespace dmoe
