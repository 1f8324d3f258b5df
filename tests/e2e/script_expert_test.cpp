// A TorchScript file of one's own, hosted by the program and trained by a libtorch client.
#include "dmoe/remote_expert.hpp"
#include "tests/e2e/program_run.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/text.hpp"

#include <torch/script.h>
#include <torch/types.h>

#include <csignal>

using namespace dmoe;
using dmoe::test::contains;
using dmoe::test::patience_ends;
using dmoe::test::run_dmoe;
using dmoe::test::RunningNode;
using dmoe::test::test_directory;

namespace {

/// (x, mask) → (x * scale + kept, 2 * sum of x in float64, kept as int64), where kept counts the mask of each row.
std::filesystem::path save_script(const std::filesystem::path& folder) {
  torch::jit::Module module("Counted");
  module.register_parameter("scale", torch::full({3}, 2.0).requires_grad_(true), /*is_buffer=*/false);
  module.define(R"(
def forward(self, x, mask):
    kept = mask.sum(1)
    return x * self.scale + kept.to(x.dtype).unsqueeze(1), x.double().sum(1) * 2, kept
)");
  const auto file = folder / "counted.pt";
  module.save(file.string());
  return file;
}

std::vector<std::string> serving(const std::filesystem::path& script) {
  return {"serve",
          "script.[0:1]",
          "--expert-script",
          script.string(),
          "--expert-arg",
          "inputs=float32:3;bool:-1",
          "--optimizer",
          "sgd",
          "--learning-rate",
          "0.1",
          "--clip-grad-norm",
          "0",
          "--threads",
          "1"};
}

}  // namespace

TEST_CASE("A TorchScript expert of several inputs and outputs is served and trained and kept", "[e2e][script]") {
  const auto directory = test_directory();
  const auto script = save_script(directory.path());
  const auto x = torch::ones({2, 3});
  const auto mask = torch::tensor({true, true, false, true, false, false}).view({2, 3});
  for (int start = 0; start < 2; ++start) {
    RunningNode server(directory.path(), "server", serving(script));
    RemoteExpert expert(Client::connect(ClientOptions().initial_endpoints({server.endpoint()})), "script.0");
    const auto info = expert->info();
    CHECK(info.architecture == "script");
    REQUIRE(info.inputs.size() == 2);
    CHECK(info.inputs[1].dtype == torch::kBool);
    REQUIRE(info.outputs.size() == 3);
    CHECK(info.outputs[0].dtype == torch::kFloat32);
    CHECK(info.outputs[1].dtype == torch::kFloat64);
    CHECK(info.outputs[2].dtype == torch::kInt64);
    CHECK(info.updates == static_cast<std::uint64_t>(start));
    const double scale = start == 0 ? 2.0 : 1.8;  // Each step takes 0.1 times the sum of two rows of ones.
    auto input = x.clone().requires_grad_();
    const auto outputs = expert->forward_many({input, mask});
    REQUIRE(outputs.size() == 3);
    CHECK(torch::allclose(outputs[0].detach(),
                          torch::tensor({scale + 2, scale + 1}).to(torch::kFloat32).view({2, 1}).expand({2, 3})));
    CHECK(torch::equal(outputs[1].detach(), torch::full({2}, 6.0, torch::kFloat64)));
    CHECK(torch::equal(outputs[2], torch::tensor({2, 1}, torch::kInt64)));
    (outputs[0].sum() + outputs[1].sum()).backward();
    CHECK(torch::allclose(input.grad(), torch::full({2, 3}, scale + 2)));  // Of both outputs.
    CHECK(expert->info().updates == static_cast<std::uint64_t>(start) + 1);
    CHECK(server.process().stop(patience_ends()).code == 0);
  }
}

TEST_CASE("A TorchScript file that is not there or no script is a wrong start", "[e2e][script]") {
  const auto directory = test_directory();
  const auto missing = run_dmoe({"serve", "--expert-script", (directory.path() / "none.pt").string()});
  CHECK(missing.status.code == 2);
  CHECK(contains(missing.err, "--expert-script"));
  CHECK(contains(missing.err, "no such file"));
  const auto script = save_script(directory.path());
  const auto both = run_dmoe({"serve", "--expert", "nop", "--expert-script", script.string()});
  CHECK(both.status.code == 2);
  CHECK(contains(both.err, "--expert nop"));
  dmoe::test::write_text(directory.path() / "text.pt", "not a script");
  const auto text = run_dmoe({"serve", "x.[0:1]", "--expert-script", (directory.path() / "text.pt").string()});
  CHECK(text.status.code != 0);
  CHECK(text.status.signal == 0);
}

TEST_CASE("A server computes on several devices and refuses one that is not there", "[e2e]") {
  const auto directory = test_directory();
  RunningNode server(
      directory.path(), "server",
      {"serve", "ffn.[0:2]", "--hidden-dim", "8", "--device", "cpu", "--device", "cpu", "--threads", "1"});
  const auto client = Client::connect(ClientOptions().initial_endpoints({server.endpoint()}));
  for (const std::string name : {"ffn.0", "ffn.1"}) {
    RemoteExpert expert(client, name);
    CHECK(expert->forward(torch::ones({2, 8})).sizes() == torch::IntArrayRef({2, 8}));
  }
  const auto unknown = run_dmoe({"serve", "--device", "tpu"});
  CHECK(unknown.status.code == 2);
  CHECK(contains(unknown.err, "'tpu'"));
  const auto beyond = run_dmoe({"serve", "--device", "cuda:99"});
  CHECK(beyond.status.code != 0);
  CHECK(contains(beyond.err, "cuda"));
  CHECK(contains(beyond.err, "or use cpu"));
}
