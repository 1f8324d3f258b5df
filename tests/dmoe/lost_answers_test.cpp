// A layer behind a line that loses whole messages.
#include "testbed/network_relay.hpp"
#include "tests/dmoe/swarm.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"

namespace dmoe {
namespace {

using namespace std::chrono_literals;
using test::Swarm;

TEST_CASE("c20 an answer that was lost on the way is not waited for", "[dmoe][c20]") {
  Swarm swarm(2, {2, 4}, 8);
  testbed::NetworkRelay relay(swarm.hosts(), test::seed());
  std::vector<std::uint16_t> ports;
  for (std::size_t i = 0; i < swarm.hosts(); ++i) ports.push_back(swarm.host(i).address().endpoints.front().port);
  relay.start(ports);
  for (const auto& uid : swarm.experts()) {
    auto address = swarm.host_of(uid).address(/*announced=*/2);
    address.endpoints = {{"127.0.0.1", relay.port(uid.coordinates.front() % swarm.hosts())}};
    swarm.directory().add(uid, address);
  }
  // Waiting for what was lost would take until the limits, and then be kDeadlineExceeded.
  DMoE layer = swarm.layer(swarm.options()
                               .forward_timeout(60s)
                               .backward_timeout(60s)
                               .timeout_after_k_min(60s)
                               .straggler_patience(0)
                               .hedge_share(0)
                               .allow_zero_outputs(true));
  testbed::LinkConditions lossy;
  lossy.lost_replies = 0.3;
  relay.set(lossy);
  std::size_t lost = 0;
  std::size_t answered = 0;
  for (int step = 0; step < 10; ++step) {
    layer->forward(test::random_input(6, 8).requires_grad_()).sum().backward();
    for (const auto& call : layer->last_call()) {
      if (call.answered) {
        ++answered;
        continue;
      }
      ++lost;
      CHECK(call.code == Errc::kLost);
    }
  }
  CHECK(lost > 0);
  CHECK(answered > 0);
}

}  // namespace
}  // namespace dmoe
