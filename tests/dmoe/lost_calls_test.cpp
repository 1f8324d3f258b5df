// What a missing answer says about an expert, and about its server.
#include "dmoe/lost_calls.hpp"
#include "dmoe/server_health.hpp"
#include "gating/ban_list.hpp"
#include "tests/dmoe/swarm.hpp"
#include "tests/support/captured_log.hpp"

#include "tests/support/catch.hpp"

#include <thread>

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

TEST_CASE("a server that says it is well is believed until its third silence in a row over a second", "[dmoe]") {
  LostCalls calls;
  const ExpertUid uid{"ffn", {1}};
  for (int i = 0; i < 2; ++i) CHECK_FALSE(calls.silent({}, kStart + i * 10s));
  calls.answered({}, {});
  for (int i = 0; i < 3; ++i) CHECK_FALSE(calls.silent({}, kStart + 1min + i * 400ms));
  CHECK(calls.silent({}, kStart + 1min + 1s));
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

using Clock = std::chrono::steady_clock;

bool anybody_banned(Swarm& swarm) { return !swarm.client()->health().bans()->view(Clock::now())->empty(); }

bool is_banned(Swarm& swarm, const ExpertUid& uid) {
  return swarm.client()->health().bans()->view(Clock::now())->banned(uid, swarm.host_of(uid).address());
}

void wait_until_nobody_is_banned(Swarm& swarm) {
  while (anybody_banned(swarm)) std::this_thread::yield();
}

/// A ban that ends by time is not seen to end.
constexpr auto kForEver = 24h;

TEST_CASE("a server whose only call of a pass got lost is left out only until it says how it is", "[dmoe][b25]") {
  Swarm swarm(2, {2}, 4, kForEver);
  auto layer = swarm.layer(swarm.options().k_best(2).timeout_after_k_min(150ms));
  const auto input = test::random_input(4, 4);
  swarm.host(1).lose_calls(1);
  (void)layer->forward(input);
  CHECK(layer->stats().failed(Errc::kDeadlineExceeded) == 1);
  wait_until_nobody_is_banned(swarm);
  CHECK(swarm.host(1).questions() == 1);
  (void)layer->forward(input);
  CHECK(swarm.host(1).forwards({"ffn", {1}}) == 1);
  CHECK(layer->stats().failed_calls == 1);
}

TEST_CASE("a server that does not say how it is stays left out", "[dmoe][b25]") {
  const test::CapturedLog log;
  Swarm swarm(2, {2}, 4, 4s);
  auto layer = swarm.layer(swarm.options().k_best(2).timeout_after_k_min(150ms));
  const auto input = test::random_input(4, 4);
  swarm.host(1).hang();
  (void)layer->forward(input);
  CHECK(is_banned(swarm, {"ffn", {1}}));
  while (log.lines_with("no answer to any call").empty()) std::this_thread::yield();
  CHECK(swarm.host(1).questions() == 3);
  CHECK(is_banned(swarm, {"ffn", {1}}));
  (void)layer->forward(input);
  CHECK(layer->stats().failed_calls == 1);
}

TEST_CASE("an answer that got lost too is asked for again", "[dmoe][b25]") {
  Swarm swarm(2, {2}, 4, 6s);
  auto layer = swarm.layer(swarm.options().k_best(2).timeout_after_k_min(150ms));
  swarm.host(1).lose_calls(1);
  swarm.host(1).lose_questions(2);
  (void)layer->forward(test::random_input(4, 4));
  wait_until_nobody_is_banned(swarm);
  CHECK(swarm.host(1).questions() == 3);  // Before the ban would have ended there would have been more.
}

TEST_CASE("a server that answers questions but no calls is left out from its third silence", "[dmoe][b25]") {
  Swarm swarm(1, {2}, 4, kForEver);
  const ExpertUid uid{"ffn", {0}};
  const auto server = std::make_shared<const dht::ServerAddress>(swarm.host(0).address());
  auto& health = swarm.client()->health();
  for (int i = 0; i < 2; ++i) {
    health.silent(uid, server);
    wait_until_nobody_is_banned(swarm);
  }
  for (const auto start = Clock::now(); Clock::now() < start + LostCalls::kSpan;) std::this_thread::yield();
  health.silent(uid, server);
  CHECK(is_banned(swarm, uid));
  CHECK(swarm.host(0).questions() == 2);  // It was not asked a third time: nothing can lift the ban soon.
}

TEST_CASE("a server that answers somebody else meanwhile is not silent", "[dmoe][b25]") {
  Swarm swarm(1, {2}, 4, kForEver);
  const ExpertUid uid{"ffn", {0}};
  const auto server = std::make_shared<const dht::ServerAddress>(swarm.host(0).address());
  auto& health = swarm.client()->health();
  const auto sent = Clock::now();
  CHECK_FALSE(health.heard_since(*server, sent));
  health.silent(uid, server);
  wait_until_nobody_is_banned(swarm);
  CHECK(health.heard_since(*server, sent));
  const auto later = Clock::now();
  CHECK_FALSE(health.heard_since(*server, later));
  health.answered({"ffn", {1}}, *server);
  CHECK(health.heard_since(*server, later));
}

TEST_CASE("a server's word for itself does not acquit its experts", "[dmoe][b25]") {
  Swarm swarm(1, {2}, 4, kForEver);
  const ExpertUid broken{"ffn", {0}};
  const ExpertUid other{"ffn", {1}};
  const auto server = std::make_shared<const dht::ServerAddress>(swarm.host(0).address());
  auto& health = swarm.client()->health();
  health.failed(broken, server, server->endpoints.front(), {Errc::kInternal, "answered with NaN or Inf", {}});
  health.silent(other, server);
  while (is_banned(swarm, other)) std::this_thread::yield();
  CHECK(is_banned(swarm, broken));
}

TEST_CASE("a server that is silent at one address is asked at its next", "[dmoe][b25][c20]") {
  Swarm swarm(2, {2}, 4, 6s);
  auto address = swarm.host(0).address();
  const auto second = address.endpoints.front();
  address.endpoints.insert(address.endpoints.begin(), swarm.host(1).address().endpoints.front());
  const auto server = std::make_shared<const dht::ServerAddress>(address);
  swarm.host(1).hang();
  auto& health = swarm.client()->health();
  health.silent({"ffn", {0}}, server);
  wait_until_nobody_is_banned(swarm);
  CHECK(swarm.host(0).questions() == 1);
  CHECK(health.endpoint_of(*server) == second);
}

}  // namespace
}  // namespace dmoe
