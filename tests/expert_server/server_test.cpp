#include "expert_server/server.hpp"

#include "dht/service.hpp"
#include "expert_server/architectures.hpp"
#include "net/rpc_client.hpp"
#include "net/tensor_codec.hpp"
#include "tests/expert_server/fixtures.hpp"
#include "tests/expert_server/http_get.hpp"
#include "tests/expert_server/test_caller.hpp"
#include "tests/support/captured_log.hpp"
#include "tests/support/catch.hpp"

#include <set>

using namespace dmoe;
using namespace dmoe::expert_server;
using namespace dmoe::expert_server::test;
using dmoe::test::CapturedLog;
using namespace std::chrono_literals;

namespace {

ServerOptions small_server(const std::string& pattern = "ffn.[0:3]") {
  ServerOptions options;
  options.listen = {"127.0.0.1", 0};
  options.expert_pattern = pattern;
  options.expert.hidden_dim = 8;
  options.expert.max_batch_size = 64;
  options.compute_threads = 1;
  options.seed = 7;
  return options;
}

std::unique_ptr<Server> started(ServerOptions options) {
  auto server = Server::start(std::move(options));
  if (!server) throw std::runtime_error(describe(server.error()));
  return std::move(*server);
}

net::Endpoint endpoint_of(const Server& server) { return {"127.0.0.1", server.port()}; }

std::map<ExpertUid, std::vector<net::PeerId>> listed(dht::Service& dht, const std::string& grid,
                                                     std::size_t dimensions) {
  std::promise<std::map<ExpertUid, std::vector<net::PeerId>>> done;
  dht.directory().list_grid(grid, dimensions, std::chrono::steady_clock::now() + 5s, [&](auto found) {
    std::map<ExpertUid, std::vector<net::PeerId>> experts;
    if (found) {
      for (const auto& [uid, servers] : *found) {
        for (const auto& server : servers) experts[uid].push_back(server->peer);
      }
    }
    done.set_value(std::move(experts));
  });
  return done.get_future().get();
}

/// Repeats a look at the DHT, where news take a moment to arrive, until it shows what is expected.
template <class Predicate>
bool eventually(Predicate holds, std::chrono::seconds limit = 30s) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (std::chrono::steady_clock::now() < end) {
    if (holds()) return true;
  }
  return holds();
}

/// Each time it is ready only when it has answered a call, and answers another's at once.
void start_again_and_again(int cycles) {
  for (int cycle = 0; cycle < cycles; ++cycle) {
    const auto server = started(small_server());
    CHECK(http_get(endpoint_of(*server), "/readyz").status == 200);
    TestCaller caller(endpoint_of(*server));
    for (const std::string name : {"ffn.0", "ffn.1", "ffn.2"}) {
      REQUIRE(caller.forward(name, {torch::zeros({1, 8})}).has_value());
    }
  }
}

}  // namespace

TEST_CASE("a server answers info and forward and backward over its socket", "[server]") {
  const auto server = started(small_server());
  CHECK(server->experts().size() == 3);
  TestCaller caller(endpoint_of(*server));
  const auto info = caller.info("ffn.1");
  REQUIRE(info.has_value());
  CHECK(info->architecture == "ffn");
  CHECK(info->max_batch_size == 64);
  CHECK(info->input_shapes == std::vector<std::vector<std::int64_t>>{{8}});
  const auto x = torch::randn({5, 8});
  const auto y = caller.forward("ffn.1", {x});
  REQUIRE(y.has_value());
  CHECK(y->at(0).sizes() == at::IntArrayRef({5, 8}));
  const auto gradient = caller.backward("ffn.1", {x}, {torch::randn({5, 8})});
  REQUIRE(gradient.has_value());
  CHECK(gradient->at(0).sizes() == at::IntArrayRef({5, 8}));
  CHECK(caller.info("ffn.1")->updates == 1);
  CHECK(caller.forward("ffn.9", {x}).error().code == Errc::kNotFound);
}

TEST_CASE("the seed of a call decides its dropout mask and backward draws the same one", "[server]") {
  auto options = small_server("transformer.[0:1]");
  options.expert.architecture = "transformer";
  options.expert.arguments = {{"dropout", "0.5"}, {"heads", "2"}};
  options.expert.frozen = true;  // The same function for every call.
  const auto server = started(options);
  TestCaller caller(endpoint_of(*server));
  const auto x = torch::randn({2, 3, 8});
  const auto g = torch::randn({2, 3, 8});
  const auto forward = [&](const at::Tensor& input, std::uint64_t seed) {
    return caller.forward("transformer.0", {input}, seed).value()[0];
  };
  CHECK(same_bits(forward(x, 5), forward(x, 5)));
  CHECK_FALSE(same_bits(forward(x, 5), forward(x, 6)));
  // The gradient that backward returns is that of the function which this seed chose.
  const auto direction = torch::randn({2, 3, 8});
  constexpr double kStep = 1e-2;
  for (const std::uint64_t seed : {5, 6}) {
    const auto difference = (forward(x + kStep * direction, seed) - forward(x - kStep * direction, seed)) / (2 * kStep);
    const auto slope = (difference * g).sum().item<double>();
    const auto gradient = caller.backward("transformer.0", {x}, {g}, seed).value()[0];
    const auto other = caller.backward("transformer.0", {x}, {g}, seed + 100).value()[0];
    CHECK((gradient * direction).sum().item<double>() == Approx(slope).epsilon(0.05).margin(0.1));
    CHECK_FALSE(torch::allclose(gradient, other, 1e-3, 1e-3));
  }
}

TEST_CASE("a6 a transformer takes a padding mask as its second input over the wire", "[server][a6]") {
  auto options = small_server("transformer.[0:1]");
  options.expert.architecture = "transformer";
  options.expert.arguments = {{"padding_mask", "1"}};
  const auto server = started(options);
  TestCaller caller(endpoint_of(*server));
  CHECK(caller.info("transformer.0")->input_shapes == std::vector<std::vector<std::int64_t>>{{-1, 8}, {-1}});
  const auto x = torch::randn({2, 4, 8});
  auto padding = torch::zeros({2, 4}, at::kBool);
  padding.index_put_({at::indexing::Slice(), 3}, true);
  auto changed = x.clone();
  changed.select(1, 3).add_(7);
  const auto y = caller.forward("transformer.0", {x, padding}).value()[0];
  const auto z = caller.forward("transformer.0", {changed, padding}).value()[0];
  CHECK(torch::allclose(y.narrow(1, 0, 3), z.narrow(1, 0, 3), 1e-5, 1e-6));
  CHECK_FALSE(torch::allclose(y, z, 1e-3, 1e-3));
  const auto gradients = caller.backward("transformer.0", {x, padding}, {torch::ones({2, 4, 8})}).value();
  REQUIRE(gradients.size() == 2);
  CHECK(gradients[0].sizes() == x.sizes());
  CHECK(gradients[1].numel() == 0);  // A mask has no gradient.
  CHECK(caller.forward("transformer.0", {x}).error().code == Errc::kInvalidArgument);
  const auto short_mask = torch::zeros({2, 3}, at::kBool);
  CHECK(caller.forward("transformer.0", {x, short_mask}).has_error());
  // A size is measured on the tensor that has it, also on the second one.
  const auto long_mask = torch::zeros({10'000, 4}, at::kBool);
  CHECK(caller.forward("transformer.0", {x, long_mask}).error().code == Errc::kInvalidArgument);
}

TEST_CASE("health and readiness and metrics are on the same port", "[server]") {
  const auto server = started(small_server());
  TestCaller caller(endpoint_of(*server));
  REQUIRE(caller.forward("ffn.0", {torch::zeros({2, 8})}).has_value());
  CHECK(http_get(endpoint_of(*server), "/healthz").status == 200);
  CHECK(http_get(endpoint_of(*server), "/readyz").status == 200);
  const auto metrics = http_get(endpoint_of(*server), "/metrics");
  CHECK(metrics.status == 200);
  CHECK(metrics.body.find("dmoe_experts 3") != std::string::npos);
  // Three experts were called by the server itself. A call is counted after it is answered, by another thread.
  CHECK(eventually([&] {
    return http_get(endpoint_of(*server), "/metrics")
               .body.find("dmoe_expert_calls_total{direction=\"forward\",outcome=\"ok\"} 4") != std::string::npos;
  }));
  CHECK(http_get(endpoint_of(*server), "/api/v1/experts").body.find("\"ffn.2\"") != std::string::npos);
}

TEST_CASE("a2 a malformed neighbour leaves the bits of a good call alone", "[server]") {
  const auto server = started(small_server());
  TestCaller caller(endpoint_of(*server));
  const auto x = torch::randn({2, 8});
  const auto alone = caller.forward("ffn.0", {x}).value();
  for (const auto& bad : {torch::randn({2, 9}), torch::randn({2, 8}, at::kDouble), torch::randn({2}),
                          torch::full({2, 8}, std::numeric_limits<float>::quiet_NaN())}) {
    auto good_call = caller.start_forward("ffn.0", {x});
    auto bad_call = caller.start_forward("ffn.0", {bad});
    auto good_again = caller.start_forward("ffn.1", {x});
    const auto refused = bad_call.get();
    REQUIRE(refused.has_error());
    CHECK(refused.error().code == Errc::kInvalidArgument);
    CHECK(same_bits(good_call.get().value()[0], alone[0]));
    CHECK(good_again.get().has_value());
  }
}

TEST_CASE("a6 an oversized call is refused at once with the limit", "[server]") {
  const auto server = started(small_server());
  TestCaller caller(endpoint_of(*server));
  CHECK(caller.forward("ffn.0", {torch::zeros({64, 8})}).has_value());
  for (const std::int64_t rows : {65, 10'000}) {
    const auto refused = caller.forward("ffn.0", {torch::zeros({rows, 8})});
    REQUIRE(refused.has_error());
    CHECK(refused.error().code == Errc::kInvalidArgument);
    CHECK(refused.error().message.find("64") != std::string::npos);
    CHECK(caller.backward("ffn.0", {torch::zeros({1, 8})}, {torch::zeros({rows, 8})}).error().code ==
          Errc::kInvalidArgument);
  }
}

TEST_CASE("f2 bad gradients are refused over the wire and weights stay finite", "[server]") {
  const auto server = started(small_server());
  TestCaller caller(endpoint_of(*server));
  const auto x = torch::randn({2, 8});
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    CHECK(caller.backward("ffn.0", {x}, {torch::full({2, 8}, bad)}).error().code == Errc::kInvalidArgument);
  }
  CHECK(caller.info("ffn.0")->updates == 0);
  CHECK(caller.backward("ffn.0", {x}, {torch::full({2, 8}, 1e20)}).has_value());
  CHECK(caller.backward("ffn.0", {x}, {torch::full({2, 8}, -1e6)}).has_value());
  const auto y = caller.forward("ffn.0", {x});
  REQUIRE(y.has_value());
  CHECK(torch::isfinite(y->at(0)).all().item<bool>());
}

TEST_CASE("experts come back from a data directory with the same bits", "[server]") {
  const TemporaryFolder folder;
  auto options = small_server("ffn.[0:100]");
  options.num_experts = 3;
  options.data_dir = folder.path() / "data";
  const auto x = torch::randn({3, 8});
  std::vector<ExpertUid> uids;
  std::map<std::string, at::Tensor> before;
  net::PeerId peer;
  {
    const auto server = started(options);
    uids = server->experts();
    peer = server->peer_id();
    TestCaller caller(endpoint_of(*server));
    for (const auto& name : uids) {
      REQUIRE(caller.backward(to_string(name), {x}, {torch::randn({3, 8})}).has_value());
      before[to_string(name)] = caller.forward(to_string(name), {x}).value()[0];
    }
    server->stop();
  }
  options.seed = 99;  // Other claims and weights, were there no checkpoints.
  const auto server = started(options);
  CHECK((server->experts() == uids));
  CHECK((server->peer_id() == peer));
  TestCaller caller(endpoint_of(*server));
  for (const auto& name : uids) {
    CHECK(same_bits(caller.forward(to_string(name), {x}).value()[0], before[to_string(name)]));
    CHECK(caller.info(to_string(name))->updates == 1);
  }
}

TEST_CASE("d17 three of eight experts move to another server with their folders", "[server][d17]") {
  const TemporaryFolder here;
  const TemporaryFolder there;
  auto options = small_server("ffn.[0:8]");
  options.data_dir = here.path();
  const auto x = torch::randn({3, 8});
  std::map<std::string, at::Tensor> before;
  {
    const auto server = started(options);
    TestCaller caller(endpoint_of(*server));
    for (const auto& name : server->experts()) {
      REQUIRE(caller.backward(to_string(name), {x}, {torch::randn({3, 8})}).has_value());
      before[to_string(name)] = caller.forward(to_string(name), {x}).value()[0];
    }
    server->stop();
  }
  for (const std::string name : {"ffn.1", "ffn.4", "ffn.6"}) {
    std::filesystem::create_directories(there.path() / "checkpoints");
    std::filesystem::rename(here.path() / "checkpoints" / name, there.path() / "checkpoints" / name);
  }
  options.num_experts = 3;  // Whichever there are: those that lie in its folder.
  options.data_dir = there.path();
  options.seed = 99;
  options.compute_threads = 2;
  options.devices = {"cpu", "cpu"};
  const auto server = started(options);
  CHECK((server->experts() == std::vector<ExpertUid>{uid("ffn.1"), uid("ffn.4"), uid("ffn.6")}));
  TestCaller caller(endpoint_of(*server));
  for (const auto& name : server->experts()) {
    CHECK(same_bits(caller.forward(to_string(name), {x}).value()[0], before[to_string(name)]));
    CHECK(caller.info(to_string(name))->updates == 1);
  }
}

TEST_CASE("a data directory in use is a clear error and nothing is lost", "[server]") {
  const TemporaryFolder folder;
  auto options = small_server();
  options.data_dir = folder.path();
  const auto server = started(options);
  const auto second = Server::start(options);
  REQUIRE(second.has_error());
  CHECK(second.error().code == Errc::kUnavailable);
  CHECK(second.error().message.find("in use") != std::string::npos);
  TestCaller caller(endpoint_of(*server));
  CHECK(caller.info("ffn.0").has_value());
}

TEST_CASE("d16 an expert is not there before it is loaded", "[server][d16]") {
  struct Gate {
    std::promise<std::uint16_t> port;
    std::promise<void> open;
  };
  auto gate = std::make_shared<Gate>();
  auto opened = gate->open.get_future().share();
  register_architecture("slow", [opened](ArchitectureArguments&) -> std::unique_ptr<ExpertModule> {
    opened.wait();
    return std::make_unique<FunctionExpert>(8, [](const at::Tensor& x) { return x; });
  });
  const auto seed = started(small_server("other.[0:1]"));
  auto options = small_server("slow.[0:1]");
  options.expert.architecture = "slow";
  options.initial_peers = {endpoint_of(*seed)};
  // A port that was free a moment ago: the caller must know it before start returns.
  options.listen.port = started(small_server())->port();
  auto starting = std::async(std::launch::async, [options] { return Server::start(options); });
  const net::Endpoint endpoint{"127.0.0.1", options.listen.port};
  REQUIRE(eventually([&] { return http_get(endpoint, "/healthz").status == 200; }));
  CHECK(http_get(endpoint, "/readyz").status == 503);
  TestCaller caller(endpoint);
  CHECK(caller.forward("slow.0", {torch::zeros({1, 8})}).error().code == Errc::kUnavailable);
  CHECK(listed(seed->dht(), "slow", 1).empty());
  gate->open.set_value();
  const auto server = starting.get();
  REQUIRE(server.has_value());
  CHECK(http_get(endpoint, "/readyz").status == 200);
  CHECK(caller.forward("slow.0", {torch::zeros({1, 8})}).has_value());
  CHECK(eventually([&] { return listed(seed->dht(), "slow", 1).size() == 1; }));
}

TEST_CASE("an expert that cannot answer a call to itself is never announced", "[server]") {
  register_architecture("broken", [](ArchitectureArguments&) -> std::unique_ptr<ExpertModule> {
    return std::make_unique<FunctionExpert>(
        8, [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("out of order"); });
  });
  auto options = small_server("broken.[0:1]");
  options.expert.architecture = "broken";
  const auto server = Server::start(options);
  REQUIRE(server.has_error());
  CHECK(server.error().message.find("out of order") != std::string::npos);
}

TEST_CASE("a20 a server comes up again and again", "[server][a20]") { start_again_and_again(20); }

TEST_CASE("a20 a server comes up 100 times", "[.long][a20]") { start_again_and_again(100); }

TEST_CASE("experts are in the DHT while their server lives and gone when it stops", "[server]") {
  const auto seed = started(small_server("other.[0:1]"));
  auto options = small_server("ffn.[0:2].[0:2]");
  options.initial_peers = {endpoint_of(*seed)};
  auto server = started(options);
  const auto all_there = [&] { return listed(seed->dht(), "ffn", 2).size() == 4; };
  CHECK(eventually(all_there));
  server->stop();
  CHECK(eventually([&] { return listed(seed->dht(), "ffn", 2).empty(); }));
}

TEST_CASE("b15 two servers on one pattern end with one owner for each expert", "[server][b15]") {
  const auto seed = started(small_server("other.[0:1]"));
  auto options = small_server("ffn.[0:4]");
  options.initial_peers = {endpoint_of(*seed)};
  options.heartbeat = 500ms;
  options.announcement_ttl = 20s;
  auto first = std::async(std::launch::async, [&] { return Server::start(options); });
  auto second = std::async(std::launch::async, [&] { return Server::start(options); });
  auto a = first.get();
  auto b = second.get();
  REQUIRE((a.has_value() || b.has_value()));  // One may find all taken already.
  const auto hosted = [](auto& server) { return server ? (*server)->experts() : std::vector<ExpertUid>{}; };
  const auto settled = [&] {
    std::multiset<ExpertUid> all;
    for (const auto& name : hosted(a)) all.insert(name);
    for (const auto& name : hosted(b)) all.insert(name);
    const bool once = std::set<ExpertUid>(all.begin(), all.end()).size() == all.size();
    const auto seen = listed(seed->dht(), "ffn", 1);
    const bool one_owner =
        std::all_of(seen.begin(), seen.end(), [](const auto& entry) { return entry.second.size() == 1; });
    return all.size() == 4 && once && seen.size() == 4 && one_owner;
  };
  CHECK(eventually(settled));
}

TEST_CASE("a loser picks other free experts of the pattern", "[server][b15]") {
  const auto seed = started(small_server("other.[0:1]"));
  auto options = small_server("ffn.[0:8]");
  options.initial_peers = {endpoint_of(*seed)};
  options.num_experts = 4;
  options.heartbeat = 500ms;
  options.announcement_ttl = 20s;
  const CapturedLog log;
  auto first = std::async(std::launch::async, [&] { return Server::start(options); });  // Equal seeds: equal draws.
  auto second = std::async(std::launch::async, [&] { return Server::start(options); });
  auto a = first.get();
  auto b = second.get();
  REQUIRE(a.has_value());
  REQUIRE(b.has_value());
  CHECK(eventually([&] {
    std::set<ExpertUid> all;
    for (const auto& name : (*a)->experts()) all.insert(name);
    for (const auto& name : (*b)->experts()) all.insert(name);
    return all.size() == 8 && listed(seed->dht(), "ffn", 1).size() == 8;
  }));
  // Each expert that was given up is told of, with who keeps it. When one server saw the other's claims in time, none
  // was.
  for (const auto& line : log.warnings()) {
    const bool kept = line.find("which keeps it") != std::string::npos &&
                      (line.find(net::short_string((*a)->peer_id())) != std::string::npos ||
                       line.find(net::short_string((*b)->peer_id())) != std::string::npos);
    CHECK((kept || line.find("heartbeat") != std::string::npos));
  }
}

TEST_CASE("options that do not fit are refused with the reason", "[server]") {
  const auto refused = [](auto change) {
    auto options = small_server();
    change(options);
    const auto server = Server::start(options);
    REQUIRE(server.has_error());
    CHECK(server.error().code == Errc::kInvalidArgument);
    return server.error().message;
  };
  CHECK(refused([](auto& o) { o.expert_pattern = "ffn.[4:0]"; }).find("ffn") != std::string::npos);
  CHECK(refused([](auto& o) { o.expert_pattern = "ffn.[0:256].[0:256]"; }).find("num_experts") != std::string::npos);
  CHECK(refused([](auto& o) { o.num_experts = 9; }).find("only 3") != std::string::npos);
  CHECK(refused([](auto& o) { o.expert.architecture = "fnn"; }).find("fnn") != std::string::npos);
  CHECK(refused([](auto& o) { o.expert.optimizer = "adamx"; }).find("adam") != std::string::npos);
  CHECK(refused([](auto& o) { o.expert.learning_rate = -1; }).find("learning_rate") != std::string::npos);
  CHECK(refused([](auto& o) { o.expert.hidden_dim = 0; }).find("hidden_dim") != std::string::npos);
}

TEST_CASE("g15 experts larger than the machine are refused with their size", "[server][g15]") {
  auto options = small_server("ffn.[0:16]");
  options.expert.hidden_dim = 65'536;
  const auto refused = Server::start(options);
  REQUIRE(refused.has_error());
  CHECK(refused.error().code == Errc::kInvalidArgument);
  CHECK(refused.error().message.find("GiB") != std::string::npos);
}

TEST_CASE("a port in use is a clear error", "[server]") {
  const auto server = started(small_server());
  auto options = small_server("other.[0:1]");
  options.listen.port = server->port();
  const auto second = Server::start(options);
  REQUIRE(second.has_error());
  CHECK(second.error().code == Errc::kUnavailable);
  CHECK(second.error().message.find(std::to_string(server->port())) != std::string::npos);
}

TEST_CASE("dead initial peers end the start unless being alone is allowed", "[server]") {
  auto options = small_server();
  {
    const auto gone = started(small_server());
    options.initial_peers = {endpoint_of(*gone)};
  }
  options.join_timeout = 500ms;
  const auto refused = Server::start(options);
  REQUIRE(refused.has_error());
  CHECK(refused.error().code == Errc::kUnavailable);
  CHECK(refused.error().message.find(net::to_string(options.initial_peers[0])) != std::string::npos);
  options.allow_alone = true;
  CHECK(Server::start(options).has_value());
}

TEST_CASE("a start can be given up", "[server]") {
  std::stop_source abort;
  abort.request_stop();
  const auto server = Server::start(small_server(), abort.get_token());
  REQUIRE(server.has_error());
  CHECK(server.error().code == Errc::kCancelled);
}
