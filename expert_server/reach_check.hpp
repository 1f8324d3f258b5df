// Whether others reach what this server announces.
#pragma once

#include "dht/node.hpp"
#include "net/endpoint.hpp"

#include <mutex>
#include <stop_token>
#include <vector>

namespace dmoe::dht {
class Service;
}

namespace dmoe::expert_server {

struct AnnouncedEndpoint {
  net::Endpoint endpoint;
  dht::Reach reach = dht::Reach::kUnknown;
};

/// Has other DHT nodes open TCP connections to the announced endpoints. They dial only the address that they see this
/// server at; an endpoint with another one cannot be tested and is announced as told. Thread-safe.
class ReachCheck {
 public:
  /// `dht` outlives this.
  ReachCheck(dht::Service& dht, const std::vector<net::Endpoint>& announced);

  /// What may be announced: all but what those who tried did not reach, twice in a row. Asks again only about endpoints
  /// without a final answer; each change is one log line. Waits for answers, a few seconds at most, and resolves names.
  std::vector<net::Endpoint> check(const std::stop_token& stop);

  std::vector<AnnouncedEndpoint> latest() const;

 private:
  struct State {
    AnnouncedEndpoint announced;
    bool settled = false;  // Reached once, or never to be tested.
  };

  void look_at(State& state, const std::stop_token& stop);
  dht::DialReport ask(std::uint16_t port, const std::stop_token& stop);
  void set(State& state, dht::Reach reach);

  dht::Service& dht_;
  std::vector<State> states_;  // The announcing thread's; `reach` is written under mutex_.
  mutable std::mutex mutex_;
};

}  // namespace dmoe::expert_server
