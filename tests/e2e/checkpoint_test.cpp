// What a server keeps over its end, and what it does when that is damaged.
#include "dmoe/remote_expert.hpp"
#include "expert_server/checkpoint_files.hpp"
#include "expert_server/checkpoint_store.hpp"
#include "tests/e2e/program_run.hpp"
#include "tests/support/catch.hpp"

#include <torch/types.h>

#include <chrono>
#include <csignal>
#include <random>

using namespace dmoe;
using dmoe::test::patience_ends;
using dmoe::test::RunningNode;
using dmoe::test::test_directory;

namespace {

constexpr std::int64_t kWidth = 8;

std::vector<std::string> server_arguments() {
  return {"serve", "ffn.0.[0:1]", "--hidden-dim", std::to_string(kWidth), "--threads", "1"};
}

torch::Tensor probe() { return torch::linspace(-1, 1, 4 * kWidth).view({4, kWidth}); }

RemoteExpert expert_of(const RunningNode& server) {
  return RemoteExpert(Client::connect(ClientOptions().initial_endpoints({server.endpoint()})), "ffn.0.0");
}

void train(RemoteExpert& expert, int steps) {
  for (int i = 0; i < steps; ++i) expert->forward(probe().requires_grad_()).pow(2).sum().backward();
}

/// The one checkpoint file of ffn.0.0.
std::filesystem::path checkpoint_file(const std::filesystem::path& data) {
  std::filesystem::path found;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(data / "checkpoints")) {
    if (entry.is_regular_file()) found = entry.path();
  }
  REQUIRE_FALSE(found.empty());
  return found;
}

/// What a checkpoint file holds answers this to the probe.
torch::Tensor answer_of(const expert_server::ExpertSnapshot& snapshot) {
  auto backend =
      expert_server::ExpertBackend::create(snapshot.description, snapshot.optimizer, 64, std::nullopt).value();
  backend->restore(snapshot).value();
  return backend->forward({probe()}, 0).value().at(0);
}

/// Kills a server that learns and writes checkpoints all the time, at random moments, and starts it again each time.
void kill_while_serving(int kills) {
  const auto directory = test_directory();
  std::mt19937_64 random(dmoe::test::seed());
  auto arguments = server_arguments();
  arguments.insert(arguments.end(), {"--checkpoint-period", "0.02", "--keep-checkpoints", "2"});
  std::uint64_t least = 0;
  int restored = 0;
  for (int round = 0; round <= kills; ++round) {
    RunningNode server(directory.path(), "server", arguments);
    RemoteExpert expert = expert_of(server);
    const auto updates = expert->info().updates;
    if (const auto files = expert_server::find_checkpoints(directory.path() / "server" / "checkpoints")) {
      const auto newest = expert_server::read_checkpoint(files->back());
      REQUIRE(newest.has_value());  // What has a checkpoint's name is complete.
      CHECK(updates == newest->updates);
      CHECK(updates >= least);
      CHECK(torch::equal(expert->forward(probe()).detach(), answer_of(*newest)));
      ++restored;
    }
    least = updates;
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(random() % 120'000);
    do {
      train(expert, 1);
    } while (std::chrono::steady_clock::now() < end);
    server.process().send(SIGKILL);
    REQUIRE(server.process().wait(patience_ends()).has_value());
  }
  CHECK(restored >= kills / 2);
}

}  // namespace

TEST_CASE("d2 A server killed while it writes checkpoints serves the last complete one", "[e2e][d2]") {
  kill_while_serving(4);
}

TEST_CASE("d2 A server killed 200 times while it writes checkpoints serves the last complete one", "[.long][d2]") {
  kill_while_serving(200);
}

TEST_CASE("A server restarted from its checkpoint answers with the same bits and learns the same", "[e2e]") {
  const auto directory = test_directory();
  torch::Tensor before;
  std::uint64_t updates = 0;
  {
    RunningNode server(directory.path(), "server", server_arguments());
    RemoteExpert expert = expert_of(server);
    const torch::Tensor fresh = expert->forward(probe());
    train(expert, 5);
    before = expert->forward(probe()).detach();
    CHECK_FALSE(torch::equal(fresh, before));
    updates = expert->info().updates;
    CHECK(updates == 5);
    CHECK(server.process().stop(patience_ends()).code == 0);
  }
  const auto saved = directory.path() / "saved";
  std::filesystem::copy(directory.path() / "server", saved, std::filesystem::copy_options::recursive);
  std::vector<torch::Tensor> after;
  for (const char* name : {"server", "saved"}) {
    RunningNode server(directory.path(), name, server_arguments());
    RemoteExpert expert = expert_of(server);
    CHECK(torch::equal(expert->forward(probe()), before));
    CHECK(expert->info().updates == updates);
    train(expert, 2);  // Equal only when the optimizer's state came back, too.
    after.push_back(expert->forward(probe()).detach());
    CHECK(server.process().stop(patience_ends()).code == 0);
  }
  CHECK(torch::equal(after[0], after[1]));
  CHECK_FALSE(torch::equal(after[0], before));
}

TEST_CASE("A server with only a damaged checkpoint refuses to start and leaves it alone", "[e2e]") {
  const auto directory = test_directory();
  {
    RunningNode server(directory.path(), "server", server_arguments());
    RemoteExpert expert = expert_of(server);
    train(expert, 1);
    CHECK(server.process().stop(patience_ends()).code == 0);
  }
  const auto file = checkpoint_file(directory.path() / "server");
  std::string bytes = test::read_text(file);
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 0x10);
  test::write_text(file, bytes);
  std::vector<std::string> arguments = server_arguments();
  arguments.insert(arguments.end(), {"--data-dir", (directory.path() / "server").string()});
  const test::Finished run = test::run_dmoe(arguments);
  INFO(run.err);
  CHECK(run.status.code == 1);
  CHECK(run.err.find(file.parent_path().string()) != std::string::npos);
  CHECK(run.err.find("damaged") != std::string::npos);
  CHECK(test::read_text(file) == bytes);
}

TEST_CASE("A checkpoint of another width is refused before serving", "[e2e]") {
  const auto directory = test_directory();
  {
    RunningNode server(directory.path(), "server", server_arguments());
    CHECK(server.process().stop(patience_ends()).code == 0);
  }
  const test::Finished run = test::run_dmoe(
      {"serve", "ffn.0.[0:1]", "--hidden-dim", "16", "--data-dir", (directory.path() / "server").string()});
  INFO(run.err);
  CHECK(run.status.code == 1);
  CHECK(run.err.find("ffn.0.0") != std::string::npos);
}
