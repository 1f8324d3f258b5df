// A server that is started and stopped again and again.
#include "dmoe/remote_expert.hpp"
#include "tests/e2e/program_run.hpp"
#include "tests/e2e/sockets.hpp"
#include "tests/support/catch.hpp"

#include <torch/types.h>

#include <string>

using namespace dmoe;
using dmoe::test::patience_ends;
using dmoe::test::RunningNode;
using dmoe::test::test_directory;

namespace {

/// Each time it joins the node that is there, so that its DHT, its listener and its experts come up together, and says
/// that it is ready only when all of them answer.
void start_and_stop(int cycles) {
  const auto directory = test_directory();
  const RunningNode seed(directory.path(), "seed", {"dht", "run"});
  for (int cycle = 0; cycle < cycles; ++cycle) {
    RunningNode server(
        directory.path(), "server",
        {"serve", "ffn.[0:3]", "--hidden-dim", "8", "--threads", "1", "--initial-peers", seed.address()});
    INFO("cycle " << cycle << ": " << server.log());
    REQUIRE(server.ready().experts.size() == 3);
    CHECK_FALSE(test::http_get(server.endpoint(), "/readyz").empty());
    const auto client = Client::connect(ClientOptions().initial_endpoints({server.endpoint()}));
    for (const std::string name : {"ffn.0", "ffn.1", "ffn.2"}) {
      RemoteExpert expert(client, name);
      CHECK(expert->forward(torch::ones({1, 8})).sizes() == at::IntArrayRef({1, 8}));
    }
    CHECK(server.process().stop(patience_ends()).code == 0);
  }
}

}  // namespace

TEST_CASE("a20 A server of three experts comes up each time", "[e2e][a20]") { start_and_stop(5); }

TEST_CASE("a20 A server of three experts comes up 100 times", "[.long][a20]") { start_and_stop(100); }
