// Several devices in one server, and what is done for devices that are not the CPU.
#include "expert_server/device.hpp"

#include "expert_server/device_steps.hpp"
#include "expert_server/runtimes.hpp"
#include "expert_server/server.hpp"
#include "tests/expert_server/fixtures.hpp"
#include "tests/expert_server/http_get.hpp"
#include "tests/expert_server/test_caller.hpp"
#include "tests/support/catch.hpp"

#include <torch/cuda.h>

#include <nlohmann/json.hpp>

#include <atomic>

using namespace dmoe;
using namespace dmoe::expert_server;
using namespace dmoe::expert_server::test;
using namespace std::chrono_literals;

namespace {

/// One parameter and what an optimizer keeps of it.
struct Learner {
  at::Tensor weight = torch::randn({7, 5});
  std::vector<at::Tensor> state{torch::zeros({7, 5}), torch::zeros({7, 5}), torch::zeros({7, 5})};

  Learner copy() const {
    Learner other{weight.clone(), {}};
    for (const auto& tensor : state) other.state.push_back(tensor.clone());
    return other;
  }
};

/// An expert that may run beside others.
class Neighbour final : public ExpertModule {
 public:
  Neighbour(FunctionExpert::Function function, bool beside_others)
      : inner_(3, std::move(function)), beside_others_(beside_others) {}
  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs, at::Generator& generator) override {
    return inner_.forward(inputs, generator);
  }
  const ExpertSchema& schema() const override { return inner_.schema(); }
  std::vector<NamedTensor> parameters() const override { return {}; }
  bool runs_beside_others() const override { return beside_others_; }

 private:
  FunctionExpert inner_;
  bool beside_others_;
};

std::shared_ptr<HostedExpert> neighbour(FunctionExpert::Function function, bool beside_others, int number) {
  return std::make_shared<HostedExpert>(
      backend_of(std::make_unique<Neighbour>(std::move(function), beside_others), "test." + std::to_string(number)),
      TaskPoolOptions{});
}

}  // namespace

TEST_CASE("a device is named and one that is not there is refused with what to do", "[device]") {
  CHECK(parse_device("cpu").value().is_cpu());
  for (const std::string wrong : {"gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1000", "cpu:0", ""}) {
    const auto device = parse_device(wrong);
    REQUIRE(device.has_error());
    CHECK(device.error().code == Errc::kInvalidArgument);
  }
  const auto beyond = parse_device("cuda:127");  // No machine has so many.
  REQUIRE(beyond.has_error());
  CHECK(beyond.error().message.find("or use cpu") != std::string::npos);
  if (at::hasCUDA()) return;
  CHECK(parse_device("cuda").error().message.find("CUDA build of libtorch") != std::string::npos);
  ServerOptions options;
  options.listen = {"127.0.0.1", 0};
  options.devices = {"cpu", "cuda"};
  const auto server = Server::start(options);
  REQUIRE(server.has_error());
  CHECK(server.error().code == Errc::kInvalidArgument);
}

TEST_CASE("steps as torch operations are the steps of the own loops", "[device][optimizer]") {
  for (const bool amsgrad : {true, false}) {
    for (const double decoupled : {1.0, 0.99}) {
      const AdamFactors factors{0.5, 0.1, decoupled, 0.9, 0.999, 0.01, 1.2, 1e-8};
      Learner ours;
      if (!amsgrad) ours.state.pop_back();
      const auto theirs = ours.copy();
      for (int i = 0; i < 5; ++i) {
        const auto gradient = torch::randn({7, 5});
        adam_step(AdamMemory<float>{ours.weight.data_ptr<float>(), gradient.data_ptr<float>(),
                                    ours.state[0].data_ptr<float>(), ours.state[1].data_ptr<float>(),
                                    amsgrad ? ours.state[2].data_ptr<float>() : nullptr},
                  35, factors);
        adam_step_on_device(theirs.weight, gradient, theirs.state, factors);
      }
      CHECK(torch::allclose(ours.weight, theirs.weight, 1e-5, 1e-6));
      for (std::size_t i = 0; i < ours.state.size(); ++i) {
        CHECK(torch::allclose(ours.state[i], theirs.state[i], 1e-5, 1e-7));
      }
    }
  }
  for (const bool nesterov : {true, false}) {
    Learner ours;
    ours.state.resize(1);
    const auto theirs = ours.copy();
    for (int i = 0; i < 5; ++i) {
      const SgdFactors factors{0.5, 0.1, 0.05, 0.9, nesterov, i == 0};
      const auto gradient = torch::randn({7, 5});
      sgd_step(
          SgdMemory<float>{ours.weight.data_ptr<float>(), gradient.data_ptr<float>(), ours.state[0].data_ptr<float>()},
          35, factors);
      sgd_step_on_device(theirs.weight, gradient, theirs.state, factors);
    }
    CHECK(torch::allclose(ours.weight, theirs.weight, 1e-5, 1e-6));
  }
  const std::vector<at::Tensor> gradients{torch::randn({4, 4}), at::Tensor(), torch::randn({3})};
  const double expected = gradients[0].square().sum().item<double>() + gradients[2].square().sum().item<double>();
  CHECK(squared_norm_on_device(gradients) == Approx(expected));
}

TEST_CASE("each device has a thread of its own and experts are spread over them", "[device]") {
  std::atomic<int> inside{0};
  std::atomic<bool> met{false};
  const auto meet = [&](const at::Tensor& x) {
    if (++inside == 2) met = true;
    const auto limit = std::chrono::steady_clock::now() + 20s;
    while (!met && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
    --inside;
    return x + 1;
  };
  Runtimes runtimes({c10::kCPU, c10::kCPU}, {.compute_threads = 1, .grouped = false, .on_batch = {}, .on_dropped = {}});
  REQUIRE(runtimes.size() == 2);
  std::vector<std::shared_ptr<HostedExpert>> experts;
  for (int i = 0; i < 4; ++i) {
    experts.push_back(neighbour(meet, true, i));
    runtimes.place(*experts.back());
    CHECK(experts.back()->runtime == static_cast<std::size_t>(i % 2));
  }
  Answers answers(2);  // Each waits for the other: one thread could not answer both.
  for (std::size_t i = 0; i < 2; ++i) {
    auto task = answers.task(i, {torch::full({1, 3}, double(i))});
    REQUIRE(runtimes.of(*experts[i]).submit(experts[i], Direction::kForward, task).has_value());
  }
  REQUIRE(answers.wait_all());
  CHECK(met);
  for (std::size_t i = 0; i < 2; ++i) CHECK(answers[i].value()[0][0][0].item<float>() == float(i) + 1);
  // What is taken away makes room; what must not run beside others stays on one thread.
  runtimes.forget(*experts[0]);
  const auto next = neighbour(meet, true, 5);
  runtimes.place(*next);
  CHECK(next->runtime == 0);
  for (int i = 6; i < 9; ++i) {
    const auto alone = neighbour(meet, false, i);
    runtimes.place(*alone);
    CHECK(alone->runtime == 0);
  }
  runtimes.stop(1s);
}

TEST_CASE("a server with two devices gives what one with one gives", "[device][server]") {
  const auto options_for = [](const std::vector<std::string>& devices) {
    ServerOptions options;
    options.listen = {"127.0.0.1", 0};
    options.expert_pattern = "ffn.[0:4]";
    options.expert.hidden_dim = 8;
    options.compute_threads = 1;
    options.devices = devices;
    options.seed = 11;
    return options;
  };
  const auto one = Server::start(options_for({"cpu"})).value();
  const auto two = Server::start(options_for({"cpu", "cpu"})).value();
  TestCaller first({"127.0.0.1", one->port()});
  TestCaller second({"127.0.0.1", two->port()});
  const auto x = torch::randn({3, 8});
  const auto gradient = torch::randn({3, 8});
  for (int i = 0; i < 4; ++i) {
    const auto name = "ffn." + std::to_string(i);
    for (int step = 0; step < 2; ++step) {
      const auto here = first.backward(name, {x}, {gradient}).value();
      CHECK(same_bits(second.backward(name, {x}, {gradient}).value()[0], here[0]));
    }
    CHECK(same_bits(second.forward(name, {x}).value()[0], first.forward(name, {x}).value()[0]));
  }
  const auto page = nlohmann::json::parse(http_get({"127.0.0.1", two->port()}, "/api/v1/experts").body);
  std::array<int, 2> hosted{};
  for (const auto& expert : page) {
    CHECK(expert.at("device") == "cpu");
    ++hosted.at(expert.at("runtime").get<std::size_t>());
  }
  CHECK(hosted == std::array<int, 2>{2, 2});
}

TEST_CASE("an expert moves to its device with what it has learned", "[device]") {
  const auto backend = builtin("ffn", 8, {});
  const auto x = torch::randn({2, 8});
  REQUIRE(backend->backward({x}, {x}, 0).has_value());
  const auto before = backend->snapshot();
  backend->place(c10::kCPU);
  CHECK(backend->device().is_cpu());
  CHECK(same_bits(backend->snapshot().parameters, before.parameters));
  CHECK(same_bits(backend->snapshot().optimizer_state, before.optimizer_state));
  const auto here = to_host(to_device({x}, c10::kCPU), c10::kCPU);
  CHECK(here[0].data_ptr() == x.data_ptr());  // On the CPU nothing is copied.
  CHECK_FALSE(all_finite_on(torch::full({2}, std::numeric_limits<float>::infinity())));
}
