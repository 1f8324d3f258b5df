// What /metrics says of each expert.
#include "expert_server/expert_meters.hpp"
#include "expert_server/server.hpp"
#include "expert_server/staleness.hpp"
#include "tests/expert_server/fixtures.hpp"
#include "tests/expert_server/http_get.hpp"
#include "tests/expert_server/test_caller.hpp"
#include "tests/support/catch.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>

using namespace dmoe;
using namespace dmoe::expert_server;
using namespace dmoe::expert_server::test;

namespace {

/// The value of the sample that begins with `series`, or -1.
double value_of(const std::string& page, const std::string& series) {
  const auto at = page.find("\n" + series + " ");
  return at == std::string::npos ? -1 : std::stod(page.substr(at + series.size() + 2));
}

std::size_t count_of(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

}  // namespace

TEST_CASE("metrics tell of each expert what it did", "[metrics]") {
  ServerOptions options;
  options.listen = {"127.0.0.1", 0};
  options.expert_pattern = "ffn.[0:2]";
  options.expert.hidden_dim = 8;
  options.compute_threads = 1;
  options.seed = 7;
  auto server = Server::start(options);
  REQUIRE(server.has_value());
  const net::Endpoint endpoint{"127.0.0.1", (*server)->port()};
  TestCaller caller(endpoint);
  const auto x = torch::randn({3, 8});
  REQUIRE(caller.backward("ffn.1", {x}, {x}).has_value());
  REQUIRE(caller.backward("ffn.1", {x}, {x}).has_value());
  REQUIRE(caller.forward("ffn.1", {torch::randn({1, 9})}).has_error());
  const std::string backward = R"({direction="backward",expert="ffn.1"})";
  const std::string bytes_out = R"(dmoe_per_expert_bytes_total{direction="backward",expert="ffn.1",way="out"})";
  std::string page;
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds{30};
  do {  // A call is answered before it is counted.
    page = http_get(endpoint, "/metrics").body;
  } while ((value_of(page, "dmoe_per_expert_rows_total" + backward) < 6 || value_of(page, bytes_out) < 192) &&
           std::chrono::steady_clock::now() < limit);
  CHECK(value_of(page, "dmoe_per_expert_rows_total" + backward) == 6);
  CHECK(value_of(page, "dmoe_per_expert_batches_total" + backward) == 2);
  CHECK(value_of(page, "dmoe_per_expert_device_seconds_total" + backward) > 0);
  CHECK(value_of(page, "dmoe_per_expert_wait_seconds_total" + backward) >= 0);
  CHECK(value_of(page, "dmoe_per_expert_queued_calls" + backward) == 0);
  CHECK(value_of(page, R"(dmoe_per_expert_bytes_total{direction="backward",expert="ffn.1",way="in"})") == 384);
  CHECK(value_of(page, bytes_out) == 192);
  CHECK(value_of(page, R"(dmoe_per_expert_errors_total{code="invalidArgument",expert="ffn.1"})") == 1);
  CHECK(value_of(page, R"(dmoe_per_expert_updates_total{expert="ffn.1"})") == 2);
  CHECK(value_of(page, R"(dmoe_per_expert_gradient_norm{expert="ffn.1"})") > 0);
  CHECK(value_of(page, R"(dmoe_per_expert_updates_total{expert="ffn.0"})") == 0);
  CHECK(value_of(page, "dmoe_expert_call_memory_limit_bytes") > 0);
  const auto experts = nlohmann::json::parse(http_get(endpoint, "/api/v1/experts").body);
  CHECK(experts.at(0).at("resident") == true);
  CHECK(experts.at(0).at("queued_forward") == 0);
}

TEST_CASE("however many experts there are the number of labels is bounded", "[metrics]") {
  net::Metrics metrics;
  ExpertMeterTable table(metrics, 3);
  for (int i = 0; i < 50; ++i) table.of("ffn." + std::to_string(i)).received(Direction::kForward, 10);
  table.of("ffn.1").received(Direction::kForward, 5);
  const auto page = metrics.serialize();
  CHECK(count_of(page, "dmoe_per_expert_updates_total{") == 4);
  CHECK(value_of(page, R"(dmoe_per_expert_bytes_total{direction="forward",expert="ffn.1",way="in"})") == 15);
  CHECK(value_of(page, R"(dmoe_per_expert_bytes_total{direction="forward",expert="other",way="in"})") == 470);
}

TEST_CASE("staleness counts the updates since a callers forward pass", "[metrics]") {
  Staleness staleness;
  staleness.forward(11, 5);
  staleness.forward(0, 5);
  CHECK(staleness.backward(11, 8) == std::optional<std::uint64_t>(3));
  CHECK_FALSE(staleness.backward(0, 8));
  CHECK_FALSE(staleness.backward(12, 8));
  for (std::uint64_t seed = 100; seed < 1'000; ++seed) staleness.forward(seed, 9);
  CHECK_FALSE(staleness.backward(11, 9));  // Forgotten: memory is bounded.
  CHECK(staleness.backward(999, 9) == std::optional<std::uint64_t>(0));
}

TEST_CASE("every figure of a server is there in total and for each expert", "[metrics]") {
  ServerOptions options;
  options.listen = {"127.0.0.1", 0};
  options.expert_pattern = "ffn.[0:2]";
  options.expert.hidden_dim = 8;
  options.compute_threads = 1;
  const auto server = Server::start(options).value();
  const net::Endpoint endpoint{"127.0.0.1", server->port()};
  TestCaller caller(endpoint);
  const auto x = torch::randn({3, 8});
  REQUIRE(caller.forward("ffn.1", {x}, 77).has_value());
  REQUIRE(caller.backward("ffn.1", {x}, {x}, 76).has_value());
  REQUIRE(caller.backward("ffn.1", {x}, {x}, 77).has_value());  // One update after its forward pass.
  REQUIRE(caller.forward("ffn.1", {torch::zeros({1, 9})}).has_error());
  const std::string way = R"({direction="backward",)";
  const std::vector<std::pair<std::string, double>> least{
      {R"(dmoe_expert_queued_calls)", 0},
      {R"(dmoe_expert_queued_rows)", 0},
      {R"(dmoe_expert_queue_seconds_count{direction="backward"})", 2},
      {R"(dmoe_expert_batch_rows_sum{direction="backward"})", 6},
      {R"(dmoe_expert_rows_total{direction="backward"})", 6},
      {R"(dmoe_expert_bytes_total{direction="backward",way="in"})", 384},
      {R"(dmoe_expert_bytes_total{direction="backward",way="out"})", 192},
      {R"(dmoe_expert_calls_total{direction="forward",outcome="invalidArgument"})", 1},
      {R"(dmoe_expert_calls_total{direction="backward",outcome="ok"})", 2},
      {R"(dmoe_expert_calls_dropped_total)", 0},
      {R"(dmoe_expert_updates_total)", 2},
      {R"(dmoe_expert_staleness_updates_sum)", 1},
      {R"(dmoe_expert_staleness_updates_count)", 1},
      {"dmoe_per_expert_queued_calls" + way + R"(expert="ffn.1"})", 0},
      {"dmoe_per_expert_wait_seconds_total" + way + R"(expert="ffn.1"})", 0},
      {"dmoe_per_expert_batches_total" + way + R"(expert="ffn.1"})", 2},
      {"dmoe_per_expert_rows_total" + way + R"(expert="ffn.1"})", 6},
      {"dmoe_per_expert_calls_total" + way + R"(expert="ffn.1"})", 2},
      {"dmoe_per_expert_bytes_total" + way + R"(expert="ffn.1",way="out"})", 192},
      {R"(dmoe_per_expert_errors_total{code="invalidArgument",expert="ffn.1"})", 1},
      {R"(dmoe_per_expert_updates_total{expert="ffn.1"})", 2},
      {R"(dmoe_per_expert_staleness_updates_total{expert="ffn.1"})", 1},
      {R"(dmoe_per_expert_staleness_calls_total{expert="ffn.1"})", 1}};
  const std::vector<std::string> positive{R"(dmoe_expert_device_seconds_total{direction="backward"})",
                                          R"(dmoe_expert_gradient_norm)",
                                          "dmoe_per_expert_device_seconds_total" + way + R"(expert="ffn.1"})",
                                          R"(dmoe_per_expert_gradient_norm{expert="ffn.1"})"};
  std::string page;
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds{30};
  const auto there = [&] {  // A call is answered before it is counted.
    page = http_get(endpoint, "/metrics").body;
    return std::all_of(least.begin(), least.end(),
                       [&](const auto& one) { return value_of(page, one.first) >= one.second; });
  };
  while (!there() && std::chrono::steady_clock::now() < limit) {
  }
  for (const auto& [series, value] : least) {
    INFO(series);
    CHECK(value_of(page, series) >= value);
  }
  for (const auto& series : positive) {
    INFO(series);
    CHECK(value_of(page, series) > 0);
  }
}
