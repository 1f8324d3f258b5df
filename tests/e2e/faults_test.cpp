// Servers that die, hang and are shouted at, with a trainer that goes on.
#include "dmoe/dmoe.hpp"
#include "dmoe/remote_expert.hpp"
#include "tests/e2e/program_run.hpp"
#include "tests/e2e/sockets.hpp"
#include "tests/support/catch.hpp"

#include <torch/types.h>
#include <torch/utils.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <csignal>
#include <future>
#include <random>

using namespace dmoe;
using namespace std::chrono_literals;
using dmoe::test::eventually;
using dmoe::test::patience_ends;
using dmoe::test::RunningNode;
using dmoe::test::test_directory;

namespace {

constexpr std::int64_t kInputWidth = 8;

std::vector<std::string> ffn_server(const std::string& pattern, const std::vector<std::string>& more = {}) {
  std::vector<std::string> arguments{"serve", pattern, "--hidden-dim", std::to_string(kInputWidth), "--threads", "1"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

/// Two servers: one expert each, ffn.0.0 and ffn.1.0.
struct Pair {
  cli::TemporaryDirectory directory = test_directory();
  RunningNode first{directory.path(), "first", ffn_server("ffn.0.[0:1]")};
  RunningNode second{directory.path(), "second", ffn_server("ffn.1.[0:1]", {"--initial-peers", first.address()})};
  std::shared_ptr<Client> client =
      Client::connect(ClientOptions().initial_endpoints({first.endpoint(), second.endpoint()}).ban_time(1s));

  /// A layer that sends every row to both.
  DMoE layer(std::chrono::milliseconds timeout) const {
    return DMoE(client, DMoEOptions(kInputWidth, {2, 1}, "ffn")
                            .k_best(2)
                            .k_min(1)
                            .forward_timeout(timeout)
                            .backward_timeout(timeout)
                            .timeout_after_k_min(timeout));
  }
};

std::size_t answered(const DMoE& layer) {
  const auto calls = layer->last_call();
  return static_cast<std::size_t>(std::count_if(calls.begin(), calls.end(), [](const auto& c) { return c.answered; }));
}

/// One forward and backward pass.
torch::Tensor pass(DMoE& layer) {
  const torch::Tensor output = layer->forward(torch::ones({4, kInputWidth}));
  output.sum().backward();
  return output;
}

/// How many experts answer a forward pass without a backward one.
std::size_t answers(DMoE& layer) {
  const torch::NoGradGuard no_grad;
  (void)layer->forward(torch::ones({4, kInputWidth}));
  return answered(layer);
}

bool finite(const torch::Tensor& tensor) { return torch::isfinite(tensor).all().item<bool>(); }

}  // namespace

TEST_CASE("A trainer learns from two servers", "[e2e]") {
  const auto directory = test_directory();
  const RunningNode first(directory.path(), "first", ffn_server("ffn.0.[0:2]"));
  const RunningNode second(directory.path(), "second", ffn_server("ffn.1.[0:2]", {"--initial-peers", first.address()}));
  const auto run =
      test::run_dmoe({"train", "--initial-peers", second.address(), "--grid-size", "2", "2", "--hidden-dim",
                      std::to_string(kInputWidth), "--steps", "40", "--seed", "1", "--json"});
  INFO(run.out << run.err);
  REQUIRE(run.status.code == 0);
  const std::string last = run.out.substr(run.out.rfind('\n', run.out.size() - 2) + 1);
  const auto json = nlohmann::json::parse(last);
  CHECK(json.at("steps") == 40);
  CHECK(json.at("failed_calls") == 0);
  CHECK(json.at("test_accuracy").get<double>() > 0.2);  // Twice chance: 40 steps of an 8-wide model.
  CHECK(run.out.find('\r') == std::string::npos);       // No bar where there is no terminal.
}

TEST_CASE("A trainer of another width than the experts ends at once and names the flag", "[e2e]") {
  const auto directory = test_directory();
  const RunningNode server(directory.path(), "server", ffn_server("ffn.[0:2].[0:2]"));
  // With this patience a trainer that took the refusal for a passing failure would not end.
  const auto run = test::run_dmoe({"train", "--initial-peers", server.address(), "--grid-size", "2", "2",
                                   "--hidden-dim", std::to_string(2 * kInputWidth), "--patience", "86400"});
  INFO(run.out << run.err);
  CHECK(run.status.code == 1);
  CHECK(run.err.find("[rows, 8]") != std::string::npos);
  CHECK(run.err.find("give the --hidden-dim that the servers have") != std::string::npos);
}

TEST_CASE("A server killed in the middle of a call costs the pass its answer only", "[e2e]") {
  Pair pair;
  DMoE layer = pair.layer(60s);
  REQUIRE(answers(layer) == 2);  // Both connections are up.
  pair.first.freeze();
  auto forward = std::async(std::launch::async, [&] { return layer->forward(torch::ones({4, kInputWidth})); });
  // The call has reached the stopped server's machine, so it is in the middle of it.
  REQUIRE(eventually([&] { return test::unread_bytes(pair.first.endpoint().port) > 0; }));
  pair.first.process().send(SIGKILL);
  CHECK(finite(forward.get()));
  CHECK(answered(layer) == 1);
  const auto calls = layer->last_call();
  const auto lost = std::find_if(calls.begin(), calls.end(), [](const auto& call) { return !call.answered; });
  REQUIRE(lost != calls.end());
  CHECK(to_string(lost->uid) == "ffn.0.0");
  CHECK(lost->code == Errc::kUnavailable);
}

TEST_CASE("b25 After its first failure a killed server is not called any more", "[e2e]") {
  Pair pair;
  DMoE layer = pair.layer(60s);
  (void)pass(layer);
  pair.first.process().send(SIGKILL);
  REQUIRE(pair.first.process().wait(patience_ends()).has_value());
  (void)pass(layer);
  const std::uint64_t after_first = layer->stats().failed_calls;
  CHECK(after_first >= 1);
  std::uint64_t failed = 0;
  for (int i = 0; i < 50; ++i) {
    CHECK(finite(pass(layer)));
    failed = layer->stats().failed_calls - after_first;
  }
  CHECK(failed <= 2);  // One more look after the ban time, should the machine be that slow.
}

TEST_CASE("A hanging server is skipped and used again when it goes on", "[e2e]") {
  Pair pair;
  DMoE layer = pair.layer(500ms);
  REQUIRE(answers(layer) == 2);
  pair.first.freeze();
  CHECK(finite(pass(layer)));
  CHECK(layer->stats().failed_calls >= 1);
  const std::uint64_t after_first = layer->stats().failed(Errc::kDeadlineExceeded);
  for (int i = 0; i < 5; ++i) CHECK(finite(pass(layer)));
  CHECK(layer->stats().failed(Errc::kDeadlineExceeded) <= after_first + 2);  // Not every pass pays the time-out.
  pair.first.process().send(SIGCONT);
  CHECK(eventually([&] { return answers(layer) == 2; }));
}

TEST_CASE("A trainer goes on when a server comes back with its experts", "[e2e]") {
  const auto directory = test_directory();
  const RunningNode node(directory.path(), "dht", {"dht", "run"});
  const auto serve = [&] {
    return RunningNode(directory.path(), "server", ffn_server("ffn.0.[0:1]", {"--initial-peers", node.address()}));
  };
  const auto client =
      Client::connect(ClientOptions().initial_endpoints({node.endpoint()}).ban_time(500ms).directory_ttl(500ms));
  DMoE layer(client, DMoEOptions(kInputWidth, {1, 1}, "ffn").k_best(1).forward_timeout(2s).backward_timeout(2s));
  {
    RunningNode server = serve();
    CHECK(finite(pass(layer)));
    server.process().send(SIGKILL);
    REQUIRE(server.process().wait(patience_ends()).has_value());
    CHECK_THROWS_AS(layer->forward(torch::ones({4, kInputWidth})), Exception);
  }
  const RunningNode again = serve();
  CHECK(eventually([&] {
    try {
      return finite(layer->forward(torch::ones({4, kInputWidth})));
    } catch (const Exception&) {
      return false;
    }
  }));
}

TEST_CASE("A client that connects and says nothing disturbs nobody and is dropped", "[e2e]") {
  const auto directory = test_directory();
  const RunningNode server(directory.path(), "server", ffn_server("ffn.0.[0:1]"));
  const test::TcpConnection silent(server.endpoint());
  const auto client = Client::connect(ClientOptions().initial_endpoints({server.endpoint()}));
  RemoteExpert expert(client, "ffn.0.0");
  CHECK(finite(expert->forward(torch::ones({2, kInputWidth}))));
  bool closed = false;
  CHECK(silent.receive_until_closed(patience_ends(), closed).empty());
  CHECK(closed);
}

TEST_CASE("Garbage on its ports never ends a server", "[e2e]") {
  const auto directory = test_directory();
  RunningNode server(directory.path(), "server", ffn_server("ffn.0.[0:1]"));
  RunningNode node(directory.path(), "dht", {"dht", "run", "--initial-peers", server.address()});
  std::mt19937_64 random(test::seed());
  const auto garbage = [&](std::size_t most) {
    std::string bytes(1 + random() % most, '\0');
    std::generate(bytes.begin(), bytes.end(), [&] { return static_cast<char>(random()); });
    return bytes;
  };
  const std::string upgrade =
      "GET /rpc HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
      "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
  for (int i = 0; i < 60; ++i) {
    test::TcpConnection(server.endpoint()).send(garbage(4'096));
    test::TcpConnection(server.endpoint()).send("GET / HTTP/1.1\r\n" + garbage(2'048));
    test::TcpConnection(server.endpoint()).send(upgrade + garbage(1'024));
    test::send_datagram(server.endpoint(), garbage(1'400));
    test::send_datagram(node.endpoint(), garbage(1'400));
  }
  CHECK(server.process().running());
  CHECK(node.process().running());
  const auto client = Client::connect(ClientOptions().initial_endpoints({node.endpoint()}));
  RemoteExpert expert(client, "ffn.0.0");
  CHECK(finite(expert->forward(torch::ones({2, kInputWidth}))));
}

TEST_CASE("e2 A second signal ends a program at once whatever it waits for", "[e2e]") {
  const auto directory = test_directory();
  RunningNode server(directory.path(), "server", ffn_server("ffn.0.[0:1]"));
  cli::ChildOptions options;
  options.program = test::program_under_test();
  options.arguments = {"train",
                       "--initial-peers",
                       server.address(),
                       "--grid-size",
                       "1",
                       "1",
                       "--hidden-dim",
                       std::to_string(kInputWidth),
                       "--steps",
                       "1000000",
                       "--forward-timeout",
                       "3000",
                       "--backward-timeout",
                       "3000"};
  options.log_file = directory.path() / "train.log";
  auto trainer = cli::ChildProcess::spawn(options);
  REQUIRE(trainer.has_value());
  REQUIRE(eventually([&] { return test::read_text(options.log_file).find("loss") != std::string::npos; }));
  // Stopped between two calls, the server leaves the next one unread, and the step that waits for it hangs. Stopped
  // within a call it may have read it already: then it goes on for another try.
  REQUIRE(eventually([&] {
    server.freeze();
    if (test::within(200ms, [&] { return test::unread_bytes(server.endpoint().port) > 0; })) return true;
    server.process().send(SIGCONT);
    return false;
  }));
  trainer->send(SIGINT);
  trainer->send(SIGTERM);
  const auto status = trainer->wait(patience_ends());
  REQUIRE(status.has_value());
  // Two different signals may be seen in either order.
  CHECK((status->code == 128 + SIGTERM || status->code == 128 + SIGINT));
}

TEST_CASE("A signal ends a trainer after its step with status 0", "[e2e]") {
  const auto directory = test_directory();
  const RunningNode server(directory.path(), "server", ffn_server("ffn.0.[0:1]"));
  cli::ChildOptions options;
  options.program = test::program_under_test();
  options.arguments = {"train",        "--initial-peers",           server.address(), "--grid-size", "1", "1",
                       "--hidden-dim", std::to_string(kInputWidth), "--steps",        "1000000"};
  options.log_file = directory.path() / "train.log";
  auto trainer = cli::ChildProcess::spawn(options);
  REQUIRE(trainer.has_value());
  REQUIRE(eventually([&] { return test::read_text(options.log_file).find("loss") != std::string::npos; }));
  trainer->send(SIGINT);
  const auto status = trainer->wait(patience_ends());
  REQUIRE(status.has_value());
  CHECK(status->code == 0);
  CHECK(test::read_text(options.log_file).find("interrupted after") != std::string::npos);
}

TEST_CASE("A server that was killed leaves a trace of its calls that can be read", "[e2e][trace]") {
  const auto directory = test_directory();
  const auto file = directory.path() / "trace.json";
  RunningNode server(directory.path(), "server", ffn_server("ffn.0.[0:1]", {"--trace-file", file.string()}));
  RemoteExpert expert(Client::connect(ClientOptions().initial_endpoints({server.endpoint()})), "ffn.0.0");
  expert->forward(torch::ones({3, kInputWidth})).sum().backward();
  const auto parts = [&] {
    std::vector<std::string> names;
    const auto events = nlohmann::json::parse(dmoe::test::read_text(file), nullptr, false);
    if (!events.is_array()) return names;  // It is being written.
    for (const auto& event : events) {
      if (event.value("ph", "") == "b") names.push_back(event["name"]);
    }
    return names;
  };
  REQUIRE(eventually([&] { return parts().size() >= 9; }));
  server.process().send(SIGKILL);
  REQUIRE(server.process().wait(patience_ends()).has_value());
  const auto names = parts();
  for (const char* name : {"queue ffn.0.0", "device ffn.0.0", "reply ffn.0.0"}) {
    CHECK(std::count(names.begin(), names.end(), name) == 3);  // Its own before it announces, forward and backward.
  }
}
