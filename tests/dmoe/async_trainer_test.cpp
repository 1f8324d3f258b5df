// Several training steps in flight: what each sees, in which order they count, and what becomes of those that fail.
#include "dmoe/async_trainer.hpp"

#include "dmoe/exception.hpp"
#include "tests/dmoe/swarm.hpp"
#include "tests/support/catch.hpp"

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <atomic>
#include <latch>
#include <stdexcept>
#include <vector>

namespace dmoe {
namespace {

using test::Swarm;

/// One weight and one running count, so that every update can be told from every other.
struct CounterImpl : torch::nn::Cloneable<CounterImpl> {
  CounterImpl() { CounterImpl::reset(); }
  void reset() override {
    weight = register_parameter("weight", torch::zeros({1}, torch::kDouble));
    seen = register_buffer("seen", torch::zeros({1}, torch::kDouble));
  }
  /// A loss whose gradient is `slope`.
  torch::Tensor forward(double slope) {
    seen.add_(1);
    return (weight * slope).sum();
  }
  torch::Tensor weight;
  torch::Tensor seen;
};
TORCH_MODULE(Counter);

double weight_of(const Counter& counter) { return counter->weight.item<double>(); }

/// Opens once; whoever waits goes on.
class Gate {
 public:
  void open() { latch_.count_down(); }
  void wait() { latch_.wait(); }

 private:
  std::latch latch_{1};
};

TEST_CASE("one step at a time gives the weights of a plain training loop", "[dmoe]") {
  torch::manual_seed(test::seed());
  torch::nn::Sequential plain(torch::nn::Linear(3, 4), torch::nn::Linear(4, 1));
  auto model = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(plain->clone());
  REQUIRE(model);
  std::vector<torch::Tensor> batches;
  for (int i = 0; i < 20; ++i) batches.push_back(torch::randn({8, 3}));
  torch::optim::Adam plain_optimizer(plain->parameters(), torch::optim::AdamOptions(0.01));
  for (const auto& batch : batches) {
    plain_optimizer.zero_grad();
    plain->forward(batch).pow(2).mean().backward();
    plain_optimizer.step();
  }
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(0.01));
  AsyncTrainer trainer(model, optimizer, AsyncTrainerOptions().in_flight(1));
  for (const auto& batch : batches) {
    trainer.submit([batch](torch::nn::SequentialImpl& replica) { return replica.forward(batch).pow(2).mean(); });
  }
  trainer.drain();
  CHECK(trainer.stats().applied == 20);
  CHECK(trainer.stats().max_staleness == 0);
  for (std::size_t i = 0; i < plain->parameters().size(); ++i) {
    CHECK(torch::equal(plain->parameters()[i], model->parameters()[i]));
    CHECK_FALSE(model->parameters()[i].grad().defined());
  }
}

TEST_CASE("as many steps as asked for are in flight at once", "[dmoe][c22]") {
  Counter model;
  torch::optim::SGD optimizer(model->parameters(), 1.0);
  AsyncTrainer trainer(model, optimizer, AsyncTrainerOptions().in_flight(6));
  std::latch all(6);
  for (int i = 0; i < 6; ++i) {
    trainer.submit([&](CounterImpl& replica) {
      all.arrive_and_wait();
      return replica.forward(-1);
    });
  }
  trainer.drain();
  CHECK(weight_of(model) == 6);
  CHECK(trainer.stats().applied == 6);
  CHECK(trainer.stats().max_staleness == 5);
  CHECK(trainer.stats().mean_staleness == 2.5);
}

TEST_CASE("a step sees the same weights from its beginning to its end", "[dmoe]") {
  Counter model;
  torch::optim::SGD optimizer(model->parameters(), 1.0);
  AsyncTrainer trainer(model, optimizer, AsyncTrainerOptions().in_flight(2));
  Gate begun;
  Gate go_on;
  double before = -1;
  double after = -1;
  auto slow = trainer.submit([&](CounterImpl& replica) {
    before = replica.weight.item<double>();
    auto loss = (replica.weight * replica.weight * 0.5 - 10 * replica.weight).sum();
    begun.open();
    go_on.wait();
    after = replica.weight.item<double>();
    return loss;  // Its gradient, weight - 10, is that of the weights it saw.
  });
  begun.wait();
  for (int i = 0; i < 3; ++i) {
    const auto step = trainer.submit([](CounterImpl& replica) { return replica.forward(-1); }).get();
    CHECK(step.applied);
    CHECK(step.staleness == 0);
  }
  go_on.open();
  const auto step = slow.get();
  CHECK(step.applied);
  CHECK(step.staleness == 3);
  CHECK(before == 0);
  CHECK(after == 0);
  trainer.drain();
  CHECK(weight_of(model) == 13);
}

TEST_CASE("a step that comes too late is dropped and holds up nobody", "[dmoe]") {
  Counter model;
  torch::optim::SGD optimizer(model->parameters(), 1.0);
  AsyncTrainer trainer(model, optimizer, AsyncTrainerOptions().in_flight(2).max_staleness(3));
  Gate begun;
  Gate go_on;
  auto slow = trainer.submit([&](CounterImpl& replica) {
    begun.open();
    go_on.wait();
    return replica.forward(-100);
  });
  begun.wait();
  for (int i = 0; i < 4; ++i) CHECK(trainer.submit([](CounterImpl& r) { return r.forward(-1); }).get().applied);
  go_on.open();
  const auto step = slow.get();
  CHECK_FALSE(step.applied);
  CHECK(step.staleness == 4);
  trainer.drain();
  CHECK(weight_of(model) == 4);
  CHECK(trainer.stats().dropped == 1);
  CHECK(trainer.stats().max_staleness == 0);
}

TEST_CASE("with waiting no step is lost and none is staler than the bound", "[dmoe]") {
  Counter model;
  torch::optim::SGD optimizer(model->parameters(), 1.0);
  AsyncTrainer trainer(model, optimizer, AsyncTrainerOptions().in_flight(4).max_staleness(5).late(LateStep::kWait));
  Gate begun;
  Gate go_on;
  auto slow = trainer.submit([&](CounterImpl& replica) {
    begun.open();
    go_on.wait();
    return replica.forward(-1);
  });
  begun.wait();
  // As many as go before the slow step without making it too stale.
  for (int i = 0; i < 5; ++i) CHECK(trainer.submit([](CounterImpl& r) { return r.forward(-1); }).get().applied);
  // These are computed while it runs and applied after it.
  std::latch computed(3);
  std::vector<std::future<TrainedStep>> held;
  for (int i = 0; i < 3; ++i) {
    held.push_back(trainer.submit([&](CounterImpl& replica) {
      computed.count_down();
      return replica.forward(-1);
    }));
  }
  computed.wait();
  CHECK(trainer.stats().applied == 5);
  go_on.open();
  CHECK(slow.get().staleness == 5);
  for (auto& step : held) CHECK(step.get().staleness <= 5);
  trainer.drain();
  CHECK(weight_of(model) == 9);
  CHECK(trainer.stats().dropped == 0);
  CHECK(trainer.stats().max_staleness == 5);
}

TEST_CASE("a bound below the steps asked for lets fewer be in flight", "[dmoe]") {
  Counter model;
  torch::optim::SGD optimizer(model->parameters(), 1.0);
  AsyncTrainer trainer(model, optimizer, AsyncTrainerOptions().in_flight(8).max_staleness(1).late(LateStep::kWait));
  std::atomic<int> running{0};
  std::atomic<int> most{0};
  for (int i = 0; i < 40; ++i) {
    trainer.submit([&](CounterImpl& replica) {
      const int now = ++running;
      for (int seen = most; now > seen && !most.compare_exchange_weak(seen, now);) {
      }
      auto loss = replica.forward(-1);
      --running;
      return loss;
    });
  }
  trainer.drain();
  CHECK(most <= 2);
  CHECK(trainer.stats().max_staleness <= 1);
  CHECK(weight_of(model) == 40);
}

TEST_CASE("a failing step throws from its future and the others count", "[dmoe][c18]") {
  Counter model;
  torch::optim::SGD optimizer(model->parameters(), 1.0);
  AsyncTrainer trainer(model, optimizer, AsyncTrainerOptions().in_flight(3));
  std::vector<std::future<TrainedStep>> steps;
  for (int i = 0; i < 30; ++i) {
    steps.push_back(trainer.submit([i](CounterImpl& replica) {
      auto loss = replica.forward(-1);
      if (i % 3 == 1) throw std::runtime_error("step " + std::to_string(i));
      if (i % 3 == 2) {
        loss.backward();  // A gradient is left behind, which must not reach another step.
        throw 7;
      }
      return loss;
    }));
  }
  for (int i = 0; i < 30; ++i) {
    auto& step = steps[static_cast<std::size_t>(i)];
    if (i % 3 == 0) {
      CHECK(step.get().applied);
    } else if (i % 3 == 1) {
      CHECK_THROWS_WITH(step.get(), "step " + std::to_string(i));
    } else {
      CHECK_THROWS_AS(step.get(), int);
    }
  }
  trainer.drain();
  CHECK(weight_of(model) == 10);
  CHECK(model->seen.item<double>() <= 10);  // What a failed step did to its buffers is lost with it.
  CHECK(trainer.stats().failed == 20);
  CHECK_FALSE(trainer.stats().last_failure.empty());
}

TEST_CASE("buffers come back and the caller may touch gradients before each update", "[dmoe]") {
  Counter model;
  torch::optim::SGD optimizer(model->parameters(), 1.0);
  int updates = 0;
  AsyncTrainer trainer(model, optimizer, AsyncTrainerOptions().in_flight(1).before_update([&] {
    ++updates;
    torch::nn::utils::clip_grad_norm_(model->parameters(), 0.5);
    if (updates == 4) throw std::runtime_error("no more");
  }));
  for (int i = 0; i < 3; ++i) {
    CHECK(trainer.submit([](CounterImpl& replica) { return replica.forward(-8); }).get().loss <= 0);
  }
  CHECK_THROWS_WITH(trainer.submit([](CounterImpl& replica) { return replica.forward(-8); }).get(), "no more");
  trainer.drain();
  CHECK(updates == 4);
  CHECK(weight_of(model) == Approx(1.5).epsilon(1e-5));
  CHECK(model->seen.item<double>() == 3);
  CHECK(trainer.stats().failed == 1);
}

TEST_CASE("what the caller does to the model between steps is what the next step sees", "[dmoe]") {
  Counter model;
  torch::optim::SGD optimizer(model->parameters(), 1.0);
  AsyncTrainer trainer(model, optimizer, AsyncTrainerOptions().in_flight(2));
  trainer.submit([](CounterImpl& replica) { return replica.forward(-1); });
  trainer.drain();
  {
    const torch::NoGradGuard no_grad;
    model->weight.fill_(40);
  }
  double seen = 0;
  trainer.submit([&](CounterImpl& replica) {
    seen = replica.weight.item<double>();
    return replica.forward(-2);
  });
  trainer.drain();
  CHECK(seen == 40);
  CHECK(weight_of(model) == 42);
}

TEST_CASE("a step may call backward itself and modules may share a parameter", "[dmoe]") {
  struct Tied : torch::nn::Module {
    Tied() {
      weight = register_parameter("first", torch::zeros({1}, torch::kDouble));
      register_parameter("second", weight);
    }
    torch::Tensor weight;
  };
  auto model = std::make_shared<Tied>();
  torch::optim::SGD optimizer(std::vector<torch::Tensor>{model->weight}, 1.0);
  AsyncTrainer trainer(model, optimizer, AsyncTrainerOptions().in_flight(2), [] { return std::make_shared<Tied>(); });
  for (int i = 0; i < 5; ++i) {
    trainer.submit([](Tied& replica) {
      (replica.weight * -1).sum().backward();
      const auto loss = (replica.weight * -2).sum();
      loss.backward();
      return loss.detach();
    });
  }
  trainer.drain();
  CHECK(model->weight.item<double>() == 15);
}

TEST_CASE("options and replicas that make no sense are refused by name", "[dmoe]") {
  Counter model;
  torch::optim::SGD optimizer(model->parameters(), 1.0);
  const auto make = [&](const AsyncTrainerOptions& options) { AsyncTrainer trainer(model, optimizer, options); };
  CHECK_THROWS_AS(make(AsyncTrainerOptions().in_flight(0)), Exception);
  CHECK_THROWS_AS(make(AsyncTrainerOptions().max_staleness(-2)), Exception);
  CHECK_THROWS_AS(make(AsyncTrainerOptions().compute_threads(0)), Exception);

  struct Plain : torch::nn::Module {
    explicit Plain(int features) { linear = register_module("linear", torch::nn::Linear(features, 1)); }
    torch::nn::Linear linear{nullptr};
  };
  auto plain = std::make_shared<Plain>(2);
  torch::optim::SGD of_plain(plain->parameters(), 0.1);
  CHECK_THROWS(AsyncTrainer(plain, of_plain));  // libtorch says that it cannot be cloned.
  CHECK_THROWS_AS(AsyncTrainer(plain, of_plain, {}, [] { return std::make_shared<Plain>(3); }), Exception);
  CHECK_THROWS_AS(AsyncTrainer(plain, of_plain, {}, [] { return std::shared_ptr<Plain>(); }), Exception);
  AsyncTrainer trainer(plain, of_plain, {}, [] { return std::make_shared<Plain>(2); });
  CHECK(trainer.submit([](Plain& replica) { return replica.linear(torch::ones({1, 2})).sum(); }).get().applied);
}

TEST_CASE("a model with experts elsewhere trains with many batches in flight", "[dmoe]") {
  torch::manual_seed(test::seed());
  Swarm swarm(2, {4}, 4);
  auto layer = swarm.layer(swarm.options());
  torch::nn::Sequential model(torch::nn::Linear(3, 4), layer, torch::nn::Linear(4, 1));
  model->to(torch::kDouble);
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(0.01));
  const auto input = torch::randn({16, 3}, torch::kDouble);
  const auto target = input.sum(1, true);
  const auto loss = [&] {
    const torch::NoGradGuard no_grad;
    return torch::mse_loss(model->forward(input), target).item<double>();
  };
  const double before = loss();
  {
    AsyncTrainer trainer(model, optimizer, AsyncTrainerOptions().in_flight(8));
    for (int i = 0; i < 100; ++i) {
      trainer.submit(
          [&](torch::nn::SequentialImpl& replica) { return torch::mse_loss(replica.forward(input), target); });
    }
  }  // Ends what is in flight.
  CHECK(loss() < before);
  CHECK(layer->stats().forwards == 102);
  CHECK(layer->stats().backwards == 100);
  for (const auto& uid : swarm.experts()) CHECK(swarm.host_of(uid).backwards(uid) == 100);
}

TEST_CASE("steps whose experts are gone fail with the layer's error", "[dmoe][c1]") {
  Swarm swarm(1, {2}, 4);
  auto layer = swarm.layer(swarm.options());
  torch::optim::SGD optimizer(layer->parameters(), 0.1);
  AsyncTrainer trainer(layer, optimizer, AsyncTrainerOptions().in_flight(3));
  const auto input = torch::randn({2, 4}, torch::kDouble);
  const auto step = [&](DMoEImpl& replica) { return replica.forward(input).sum(); };
  CHECK(trainer.submit(step).get().applied);
  swarm.host(0).kill();
  for (int i = 0; i < 4; ++i) CHECK_THROWS_AS(trainer.submit(step).get(), Exception);
  CHECK(trainer.stats().failed == 4);
  CHECK(trainer.stats().applied == 1);
}

}  // namespace
}  // namespace dmoe
