// det_dropout, lstm, TorchScript experts, schedules, frozen experts.
#include "expert_server/architectures.hpp"
#include "expert_server/expert_factory.hpp"
#include "expert_server/layer_norm_relu.hpp"
#include "tests/expert_server/fixtures.hpp"
#include "tests/support/catch.hpp"

#include <torch/script.h>

#include <limits>

using namespace dmoe;
using namespace dmoe::expert_server;
using namespace dmoe::expert_server::test;

namespace {

/// Saves a module y = (x * scale + shift, sum of x per row) and returns the file.
std::filesystem::path script_file(const TemporaryFolder& folder, const std::string& body = R"(
def forward(self, x, mask):
    y = x * self.scale + mask.to(x.dtype).sum(1, keepdim=True)
    return y, x.sum(1)
)") {
  torch::jit::Module module("Scaled");
  module.register_parameter("scale", torch::full({3}, 2.0).requires_grad_(true), /*is_buffer=*/false);
  module.define(body);
  const auto file = folder.path() / "scaled.pt";
  module.save(file.string());
  return file;
}

ExpertOptions script_options(const std::filesystem::path& file) {
  ExpertOptions options;
  options.architecture = "script";
  options.hidden_dim = 3;
  options.arguments = {{"file", file.string()}, {"inputs", "float32:3;bool:-1"}};
  options.optimizer = "sgd";
  options.learning_rate = 0.1;
  options.clip_grad_norm = 0;
  return options;
}

}  // namespace

TEST_CASE("a dropout mask of the caller decides what an expert sees", "[experts]") {
  const auto backend = builtin("det_dropout", 4, plain_sgd(), 1, {{"dropout", "0.5"}});
  const auto x = torch::randn({2, 4});
  const auto none = torch::zeros({2, 4}, at::kBool);
  const auto blind = backend->forward({x, none}, 0).value()[0];
  CHECK(same_bits(blind, backend->forward({x + 1, none}, 0).value()[0]));
  const auto all = torch::ones({2, 4}, at::kBool);
  CHECK_FALSE(same_bits(blind, backend->forward({x, all}, 0).value()[0]));
  const auto gradients = backend->backward({x, none}, {torch::randn({2, 4})}, 0).value();
  REQUIRE(gradients.size() == 2);
  CHECK(torch::equal(gradients[0], torch::zeros({2, 4})));
  CHECK(gradients[1].numel() == 0);
}

TEST_CASE("an lstm expert reads each row as its own sequence", "[experts]") {
  const auto backend = builtin("lstm", 4, plain_sgd());
  const auto x = torch::randn({3, 5, 4});
  const auto together = backend->forward({x}, 0).value()[0];
  CHECK(together.sizes() == at::IntArrayRef({3, 5, 4}));
  const auto alone = backend->forward({x.narrow(0, 1, 1).contiguous()}, 0).value()[0];
  CHECK(torch::allclose(together.narrow(0, 1, 1), alone, 1e-5, 1e-6));
  CHECK(backend->backward({x}, {torch::randn({3, 5, 4})}, 0).has_value());
  CHECK(backend->updates() == 1);
}

TEST_CASE("a TorchScript file with several inputs and outputs is hosted and trained", "[experts][script]") {
  const TemporaryFolder folder;
  const auto made = make_expert(uid("script.0"), script_options(script_file(folder)), nullptr, false, 1);
  REQUIRE(made.has_value());
  auto& backend = **made;
  REQUIRE(backend.schema().outputs.size() == 2);
  CHECK(backend.schema().outputs[0].shape == std::vector<std::int64_t>{3});
  CHECK(backend.schema().outputs[1].shape.empty());
  const auto x = torch::ones({2, 3});
  const auto mask = torch::ones({2, 4}, at::kBool);
  const auto outputs = backend.forward({x, mask}, 0).value();
  CHECK(torch::equal(outputs[0], torch::full({2, 3}, 6.0)));
  CHECK(torch::equal(outputs[1], torch::full({2}, 3.0)));
  const auto gradients = backend.backward({x, mask}, {torch::ones({2, 3}), torch::ones({2})}, 0).value();
  CHECK(torch::equal(gradients[0], torch::full({2, 3}, 3.0)));  // scale + 1
  CHECK(torch::allclose(backend.snapshot().parameters.at(0).tensor, torch::full({3}, 1.8)));
}

TEST_CASE("a TorchScript expert goes on from its checkpoint wherever its file lies", "[experts][script]") {
  const TemporaryFolder folder;
  const TemporaryFolder elsewhere;
  CheckpointStore store(folder.path() / "checkpoints", 3);
  const auto made = make_expert(uid("script.0"), script_options(script_file(folder)), &store, false, 1);
  REQUIRE(made.has_value());
  REQUIRE(
      (*made)
          ->backward({torch::ones({2, 3}), torch::ones({2, 4}, at::kBool)}, {torch::ones({2, 3}), torch::ones({2})}, 0)
          .has_value());
  REQUIRE(store.save((*made)->snapshot()).has_value());
  const auto moved = make_expert(uid("script.0"), script_options(script_file(elsewhere)), &store, false, 1);
  REQUIRE(moved.has_value());
  CHECK(same_bits((*moved)->snapshot().parameters, (*made)->snapshot().parameters));
}

TEST_CASE("a bad TorchScript file or input list is refused with the reason", "[experts][script]") {
  const TemporaryFolder folder;
  const auto refused = [](const ExpertOptions& options) {
    const auto made = make_expert(uid("script.0"), options, nullptr, false, 1);
    REQUIRE(made.has_error());
    CHECK(made.error().code == Errc::kInvalidArgument);
    return made.error().message;
  };
  refused(script_options(folder.path() / "none.pt"));
  auto options = script_options(script_file(folder));
  options.arguments["inputs"] = "float33:3";
  CHECK(refused(options).find("float33") != std::string::npos);
  options.arguments["inputs"] = "float32:3";  // One input too few.
  refused(options);
  options.arguments["inputs"] = "float32:x3";
  refused(options);
}

TEST_CASE("the learning rate follows its schedule", "[optimizer][schedule]") {
  const LearningSchedule warmup{ScheduleKind::kConstant, 4, 0};
  CHECK(warmup.factor(0) == Approx(0.25));
  CHECK(warmup.factor(3) == Approx(1));
  CHECK(warmup.factor(1'000'000) == Approx(1));
  const LearningSchedule linear{ScheduleKind::kLinear, 2, 12};
  CHECK(linear.factor(2) == Approx(1));
  CHECK(linear.factor(7) == Approx(0.5));
  CHECK(linear.factor(12) == Approx(0).margin(1e-12));
  CHECK(linear.factor(100) == Approx(0).margin(1e-12));
  const LearningSchedule cosine{ScheduleKind::kCosine, 0, 10};
  CHECK(cosine.factor(0) == Approx(1));
  CHECK(cosine.factor(5) == Approx(0.5));
  CHECK(cosine.factor(10) == Approx(0).margin(1e-12));
  CHECK(check(LearningSchedule{ScheduleKind::kLinear, 5, 5}).has_error());
}

TEST_CASE("d5 a schedule goes on from the step of its checkpoint", "[optimizer][schedule][d5]") {
  const TemporaryFolder folder;
  CheckpointStore store(folder.path(), 3);
  ExpertOptions options;
  options.hidden_dim = 8;
  options.schedule = "linear";
  options.total_steps = 10;
  options.learning_rate = 0.01;
  const auto made = make_expert(uid("ffn.0"), options, &store, false, 1);
  REQUIRE(made.has_value());
  const auto x = torch::randn({2, 8});
  for (int i = 0; i < 10; ++i) REQUIRE((*made)->backward({x}, {torch::randn({2, 8})}, 0).has_value());
  REQUIRE(store.save((*made)->snapshot()).has_value());
  ExpertOptions defaults;
  defaults.hidden_dim = 8;
  const auto restored = make_expert(uid("ffn.0"), defaults, &store, false, 1);
  REQUIRE(restored.has_value());
  CHECK((*restored)->snapshot().optimizer == (*made)->snapshot().optimizer);
  REQUIRE((*restored)->backward({x}, {torch::randn({2, 8})}, 0).has_value());  // The rate is 0 from here on.
  CHECK(same_bits((*restored)->snapshot().parameters, (*made)->snapshot().parameters));
}

TEST_CASE("a frozen expert returns gradients and never changes", "[experts]") {
  ExpertOptions options;
  options.hidden_dim = 8;
  options.frozen = true;
  const auto made = make_expert(uid("ffn.0"), options, nullptr, false, 1);
  REQUIRE(made.has_value());
  const auto before = (*made)->snapshot();
  const auto x = torch::randn({2, 8});
  const auto gradients = (*made)->backward({x}, {torch::ones({2, 8})}, 0);
  REQUIRE(gradients.has_value());
  CHECK(gradients->at(0).abs().sum().item<float>() > 0);
  CHECK((*made)->updates() == 0);
  CHECK(same_bits((*made)->snapshot().parameters, before.parameters));
}

TEST_CASE("LayerNorm and ReLU in one pass give what libtorch gives in two", "[experts]") {
  for (const std::int64_t width : {1, 7, 64, 1'000}) {
    const auto x = 3 * torch::randn({5, width}) + 2;
    const auto weight = torch::randn({width});
    const auto bias = torch::randn({width});
    auto ours = x.clone();
    layer_norm_relu_(ours, weight, bias, 1e-5);
    CHECK(torch::allclose(ours, torch::relu(torch::layer_norm(x, {width}, weight, bias)), 1e-4, 1e-4));
  }
  auto none = torch::zeros({0, 4});
  layer_norm_relu_(none, torch::ones({4}), torch::zeros({4}), 1e-5);
  auto bad = torch::full({1, 4}, std::numeric_limits<float>::quiet_NaN());
  layer_norm_relu_(bad, torch::ones({4}), torch::zeros({4}), 1e-5);
  CHECK(torch::isnan(bad).all().item<bool>());
}
