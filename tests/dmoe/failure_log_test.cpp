// What a trainer's log says while servers fail.
#include "dmoe/failure_log.hpp"
#include "tests/dmoe/swarm.hpp"
#include "tests/support/captured_log.hpp"

#include "tests/support/catch.hpp"
#include "tests/support/text.hpp"

#include <algorithm>
#include <map>
#include <regex>
#include <string>
#include <vector>

namespace dmoe {
namespace {

using namespace std::chrono_literals;
using test::Fault;
using test::Swarm;

net::PeerId peer(std::uint8_t number) {
  net::PeerId id;
  id.bytes.fill(number);
  return id;
}

TEST_CASE("thirty of a hundred servers that fail for ten minutes have fewer than ten lines a minute", "[dmoe][e7]") {
  FailureLog log;
  const auto start = FailureLog::TimePoint{} + 1h;
  std::map<std::int64_t, std::size_t> lines;
  std::uint64_t failures = 0;
  std::uint64_t told = 0;
  const std::regex more(": ([0-9]+) more failures");
  for (auto now = start; now < start + 10min; now += 500ms) {
    for (std::uint8_t server = 0; server < 30; ++server) {
      ++failures;
      const auto line = log.line(peer(server), "refused", now);
      if (!line) continue;
      ++lines[(now - start) / 1min];
      std::smatch match;
      told += 1 + (std::regex_search(*line, match, more) ? std::stoull(match[1]) : 0);
    }
  }
  CHECK(lines.size() == 10);
  for (const auto& [minute, count] : lines) {
    INFO("minute " << minute);
    CHECK(count < 10);
  }
  const auto last = log.line(peer(99), "refused", start + 20min);
  REQUIRE(last.has_value());
  std::smatch match;
  REQUIRE(std::regex_search(*last, match, more));
  CHECK(told + std::stoull(match[1]) == failures);  // None is lost: it is counted where it is not told.
}

TEST_CASE("a server that goes on failing is told of less and less often and anew after it was well", "[dmoe][e7]") {
  FailureLog log;
  const auto start = FailureLog::TimePoint{} + 1h;
  std::vector<std::int64_t> seconds;
  for (auto now = start; now < start + 200s; now += 1s) {
    if (log.line(peer(1), "refused", now)) seconds.push_back((now - start) / 1s);
  }
  CHECK(seconds == std::vector<std::int64_t>{0, 10, 30, 70, 150});
  CHECK(log.line(peer(2), "refused", start + 200s).has_value());
  const auto later = start + 2h;
  CHECK(log.line(peer(1), "refused", later).has_value());
  CHECK(log.line(peer(1), "refused", later + 10s).has_value());
}

TEST_CASE("the servers that a log remembers are bounded", "[dmoe][e7]") {
  FailureLog log;
  auto now = FailureLog::TimePoint{} + 1h;
  net::PeerId id;
  for (std::size_t i = 0; i < 2 * FailureLog::kMostServers; ++i, now += 11s) {
    id.bytes[0] = static_cast<std::uint8_t>(i);
    id.bytes[1] = static_cast<std::uint8_t>(i >> 8U);
    (void)log.line(id, "refused", now);
  }
  CHECK(log.servers() <= FailureLog::kMostServers);
}

TEST_CASE("training on with three of ten servers failing writes few lines and each says what to do", "[dmoe][e7]") {
  const test::CapturedLog captured;
  Swarm swarm(10, {10}, 4);
  auto layer = swarm.layer(
      swarm.options().k_best(10).k_min(1).forward_timeout(5s).timeout_after_k_min(20ms).backward_timeout(5s));
  swarm.host(0).kill();
  swarm.host(1).set_fault(Fault::kSilent, Fault::kSilent);
  swarm.host(2).set_fault(Fault::kError, Fault::kError);
  for (int i = 0; i < 50; ++i) layer->forward(test::random_input(4, 4)).sum().backward();
  CHECK(layer->stats().failed_calls >= 3);
  const auto lines = captured.lines_with("server ");
  CHECK(lines.size() >= 2);
  CHECK(lines.size() < 10);
  for (const auto& line : lines) {
    INFO(line);
    CHECK(test::contains(line, "127.0.0.1:"));
    CHECK(test::contains(line, "nothing to do here"));
  }
}

}  // namespace
}  // namespace dmoe
