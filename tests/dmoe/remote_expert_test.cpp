// One expert on another machine.
#include "dmoe/remote_expert.hpp"
#include "dmoe/remote_sequential.hpp"
#include "tests/dmoe/swarm.hpp"

#include "tests/support/catch.hpp"

namespace dmoe {
namespace {

using namespace std::chrono_literals;
using test::ExpertHost;
using test::Fault;
using test::MemoryDirectory;
using test::Tensors;

const ExpertUid kUid{"pair", {0}};

/// (x [4], mask [4]) → (x * mask, 2 x).
struct Pair {
  ExpertHost host{1};
  std::shared_ptr<MemoryDirectory> directory = std::make_shared<MemoryDirectory>();
  std::shared_ptr<Client> client;

  Pair() {
    host.host(kUid, [](const Tensors& inputs) -> Tensors { return {inputs[0] * inputs[1], inputs[0] * 2}; });
    host.describe(kUid, {{4}, {4}}, {{4}, {4}}, {torch::kFloat32, torch::kInt64});
    directory->add(kUid, host.address());
    client = Client::with_resolver(directory);
  }
};

/// x [4] → 3 x.
void host_triple(ExpertHost& host, const ExpertUid& uid, std::int64_t features = 4) {
  host.host(uid, [](const Tensors& inputs) -> Tensors { return {inputs[0] * 3}; });
  host.describe(uid, {{features}}, {{features}});
}

TEST_CASE("an expert with a mask and two outputs learns from the one that is used", "[dmoe][c11]") {
  Pair pair;
  RemoteExpert expert(pair.client, "pair.0");
  auto x = torch::randn({2, 4}).requires_grad_();
  const auto mask = torch::tensor({1, 0, 1, 0}, torch::kInt64).expand({2, 4});
  const auto outputs = expert->forward_many({x, mask});
  REQUIRE(outputs.size() == 2);
  CHECK(torch::equal(outputs[0], x * mask));
  CHECK(torch::equal(outputs[1], x * 2));
  outputs[0].sum().backward();
  CHECK(torch::equal(x.grad(), mask.to(torch::kFloat)));
  CHECK(torch::equal(pair.host.last_inputs(kUid)[1], mask));
  CHECK(torch::equal(pair.host.last_grads(kUid)[1], torch::zeros({2, 4})));
  CHECK_THROWS_AS(expert->forward(x), Exception);
}

TEST_CASE("an expert trains behind raw data but not without grad", "[dmoe][c7][c8]") {
  ExpertHost host(1);
  const ExpertUid uid{"ffn", {0}};
  host_triple(host, uid);
  const auto directory = std::make_shared<MemoryDirectory>();
  directory->add(uid, host.address());
  RemoteExpert expert(Client::with_resolver(directory), "ffn.0");
  const auto x = torch::randn({2, 4});
  expert->forward(x).sum().backward();
  CHECK(host.backwards(uid) == 1);
  CHECK(expert->info().updates == 1);
  {
    const torch::NoGradGuard no_grad;
    CHECK_FALSE(expert->forward(x).requires_grad());
  }
  expert->eval();
  CHECK_FALSE(expert->forward(x).requires_grad());
  CHECK(host.backwards(uid) == 1);
}

TEST_CASE("types of another width are converted and of another kind refused", "[dmoe][c12]") {
  ExpertHost host(1);
  const ExpertUid uid{"ffn", {0}};
  host_triple(host, uid);
  const auto directory = std::make_shared<MemoryDirectory>();
  directory->add(uid, host.address());
  RemoteExpert expert(Client::with_resolver(directory), uid);
  auto x = torch::randn({2, 4}).to(torch::kHalf).requires_grad_();
  const auto y = expert->forward(x);
  CHECK(y.scalar_type() == torch::kFloat);
  y.sum().backward();
  CHECK(x.grad().scalar_type() == torch::kHalf);
  try {
    expert->forward(torch::ones({2, 4}, torch::kInt64));
    FAIL("no error");
  } catch (const Exception& error) {
    CHECK(std::string(error.what()).find("Long") != std::string::npos);
    CHECK(std::string(error.what()).find("Float") != std::string::npos);
  }
}

TEST_CASE("an expert replaced by one of another width is noticed", "[dmoe][c26]") {
  ExpertHost host(1);
  const ExpertUid uid{"ffn", {0}};
  host_triple(host, uid, 6);
  const auto directory = std::make_shared<MemoryDirectory>();
  directory->add(uid, host.address());
  RemoteExpert expert(Client::with_resolver(directory), uid);
  CHECK(expert->forward(torch::ones({2, 6})).size(1) == 6);
  host_triple(host, uid, 3);
  CHECK(expert->forward(torch::ones({2, 3})).size(1) == 3);
  try {
    expert->forward(torch::ones({2, 6}));
    FAIL("no error");
  } catch (const Exception& error) {
    CHECK(error.code() == Errc::kInvalidArgument);
    CHECK(std::string(error.what()).find("[rows, 3]") != std::string::npos);
    CHECK(std::string(error.what()).find("[2, 6]") != std::string::npos);
  }
}

TEST_CASE("a replica takes over from a server that is gone", "[dmoe][c27]") {
  ExpertHost first(1);
  ExpertHost second(2);
  const ExpertUid uid{"ffn", {0}};
  host_triple(first, uid);
  host_triple(second, uid);
  const auto directory = std::make_shared<MemoryDirectory>();
  directory->add(uid, first.address());
  directory->add(uid, second.address());
  RemoteExpert expert(Client::with_resolver(directory), uid);
  const auto x = torch::randn({2, 4});
  CHECK(torch::equal(expert->forward(x), x * 3));
  first.kill();
  for (int i = 0; i < 5; ++i) CHECK(torch::equal(expert->forward(x), x * 3));
  CHECK(second.forwards(uid) == 5);
}

TEST_CASE("an expert that nobody hosts or that does not answer is an error with its name", "[dmoe][c1][c20]") {
  ExpertHost host(1);
  const ExpertUid uid{"ffn", {0}};
  host_triple(host, uid);
  const auto directory = std::make_shared<MemoryDirectory>();
  directory->add(uid, host.address());
  const auto client = Client::with_resolver(directory);
  const auto code_of = [](RemoteExpert& expert) {
    try {
      expert->forward(torch::ones({1, 4}));
    } catch (const Exception& error) {
      CHECK(std::string(error.what()).find("ffn.") != std::string::npos);
      return error.code();
    }
    return Errc::kCancelled;
  };
  RemoteExpert nobody(client, "ffn.7");
  CHECK(code_of(nobody) == Errc::kNotFound);
  host.set_fault(Fault::kSilent, Fault::kNone);
  RemoteExpert silent(client, uid, RemoteExpertOptions().forward_timeout(100ms));
  CHECK(code_of(silent) == Errc::kDeadlineExceeded);
  CHECK_THROWS_AS(RemoteExpert(client, "ffn."), Exception);
}

TEST_CASE("experts in sequence pass values on and gradients back", "[dmoe]") {
  ExpertHost host(1);
  const auto directory = std::make_shared<MemoryDirectory>();
  for (Coordinate i = 0; i < 3; ++i) {
    host_triple(host, {"stage", {i}});
    directory->add({"stage", {i}}, host.address());
  }
  const auto client = Client::with_resolver(directory);
  RemoteSequential pipeline(client, std::vector<std::string>{"stage.0", "stage.1", "stage.2"});
  auto x = torch::randn({2, 4}).requires_grad_();
  const auto y = pipeline->forward(x);
  CHECK(torch::allclose(y, x * 27));
  y.sum().backward();
  CHECK(torch::allclose(x.grad(), torch::full({2, 4}, 27.0F)));
  for (Coordinate i = 0; i < 3; ++i) CHECK(host.backwards({"stage", {i}}) == 1);
  CHECK_THROWS_AS(RemoteSequential(client, std::vector<std::string>{}), Exception);
}

TEST_CASE("remote experts and pipelines are cloned with the model they stand in", "[dmoe]") {
  ExpertHost host(1);
  const ExpertUid uid{"ffn", {0}};
  host_triple(host, uid);
  const auto directory = std::make_shared<MemoryDirectory>();
  directory->add(uid, host.address());
  const auto client = Client::with_resolver(directory);
  RemoteExpert expert(client, uid);
  RemoteSequential pipeline(client, std::vector<std::string>{"ffn.0", "ffn.0"});
  pipeline->eval();
  const auto x = torch::ones({2, 4});
  const auto same_expert = std::dynamic_pointer_cast<RemoteExpertImpl>(expert->clone());
  const auto same_pipeline = std::dynamic_pointer_cast<RemoteSequentialImpl>(pipeline->clone());
  REQUIRE(same_expert);
  REQUIRE(same_pipeline);
  CHECK(torch::equal(same_expert->forward(x), 3 * x));
  CHECK(torch::equal(same_pipeline->forward(x), 9 * x));
  CHECK(same_expert->is_training());
  CHECK_FALSE(same_pipeline->is_training());
}

TEST_CASE("a backward that fails is an error on the caller's thread", "[dmoe][c18]") {
  ExpertHost host(1);
  const ExpertUid uid{"ffn", {0}};
  host_triple(host, uid);
  const auto directory = std::make_shared<MemoryDirectory>();
  directory->add(uid, host.address());
  RemoteExpert expert(Client::with_resolver(directory), uid);
  const auto y = expert->forward(torch::ones({1, 4}));
  host.kill();
  CHECK_THROWS(y.sum().backward());
}

}  // namespace
}  // namespace dmoe
