// Log lines about callers: few, whoever calls.
#include "expert_server/refusal_log.hpp"

#include "expert_server/server.hpp"
#include "net/endpoint.hpp"
#include "tests/expert_server/fixtures.hpp"
#include "tests/expert_server/http_get.hpp"
#include "tests/expert_server/test_caller.hpp"
#include "tests/support/captured_log.hpp"
#include "tests/support/catch.hpp"

#include <limits>

using namespace dmoe;
using namespace dmoe::expert_server;
using namespace dmoe::expert_server::test;
using dmoe::test::CapturedLog;
using namespace std::chrono_literals;

namespace {

Error bad(const std::string& what) { return {Errc::kInvalidArgument, what, {}}; }

}  // namespace

TEST_CASE("e7 each caller is told about once a minute and all together a few times", "[log][e7]") {
  const CapturedLog log;
  auto now = std::chrono::steady_clock::now();
  RefusalLog refusals([&now] { return now; });
  for (int i = 0; i < 1'000; ++i) refusals.note("192.0.2.1:" + std::to_string(1'000 + i), bad("inputs are NaN"));
  REQUIRE(log.warnings().size() == 1);  // A new port is no new caller.
  CHECK(log.warnings()[0].find("192.0.2.1") != std::string::npos);
  CHECK(log.warnings()[0].find("inputs are NaN") != std::string::npos);
  CHECK(log.warnings()[0].find("nothing to do") != std::string::npos);
  for (int i = 0; i < 200; ++i) refusals.note("[2001:db8::" + std::to_string(i) + "]:4040", bad("x"));
  REQUIRE(log.warnings().size() == RefusalLog::kMostLines);
  CHECK(log.warnings()[1].find("999 refusals") != std::string::npos);
  now += RefusalLog::kPeriod;
  refusals.note("192.0.2.1:9", bad("again"));
  REQUIRE(log.warnings().size() == RefusalLog::kMostLines + 1);
  CHECK(log.warnings().back().find("195 refusals") != std::string::npos);  // Of the 200, five were told.
}

TEST_CASE("e7 a server stays quiet when peers come and go and send what they should not", "[log][server][e7]") {
  ServerOptions options;
  options.listen = {"127.0.0.1", 0};
  options.expert_pattern = "ffn.[0:1]";
  options.expert.hidden_dim = 8;
  options.compute_threads = 1;
  options.seed = 3;
  const auto server = Server::start(options).value();
  const net::Endpoint endpoint{"127.0.0.1", server->port()};
  const CapturedLog log;
  const auto nan = torch::full({1, 8}, std::numeric_limits<float>::quiet_NaN());
  for (int peer = 0; peer < 30; ++peer) {
    TestCaller caller(endpoint);  // Connects, calls, and is gone in the middle of a call.
    CHECK(caller.forward("ffn.0", {torch::zeros({1, 8})}).has_value());
    CHECK(caller.forward("ffn.0", {nan}).has_error());
    CHECK(caller.forward("ffn.0", {torch::zeros({1, 9})}).has_error());
    CHECK(caller.forward("ffn.9", {torch::zeros({1, 8})}).error().code == Errc::kNotFound);
    CHECK(caller.backward("ffn.0", {torch::zeros({1, 8})}, {nan}).has_error());
    (void)caller.start_forward("ffn.0", {torch::zeros({4'000, 8})});
    http_get(endpoint, "/no/such/page");
  }
  const auto told = log.warnings();
  REQUIRE(told.size() == 1);  // One caller, one line, 90 refusals.
  CHECK(told[0].find("127.0.0.1") != std::string::npos);
  TestCaller caller(endpoint);
  CHECK(caller.forward("ffn.0", {torch::zeros({1, 8})}).has_value());
}
