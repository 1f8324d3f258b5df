#include "cli/dht_client.hpp"

#include "dht/asio_address.hpp"
#include "dht/node.hpp"

#include <boost/asio/ip/udp.hpp>

#include <algorithm>
#include <future>
#include <utility>

namespace dmoe::cli {
namespace {

namespace asio = boost::asio;

/// What `start` hands to its callback. `start` may keep the callback beyond this call's end.
template <class Value, class Start>
Value wait_for(Start start) {
  const auto promise = std::make_shared<std::promise<Value>>();
  auto answer = promise->get_future();
  start([promise](Value value) { promise->set_value(std::move(value)); });
  return answer.get();
}

}  // namespace

Result<std::unique_ptr<DhtClient>> DhtClient::start(const net::Identity& identity,
                                                    std::vector<net::Endpoint> initial_peers,
                                                    std::chrono::milliseconds timeout) {
  std::unique_ptr<DhtClient> client(new DhtClient);
  client->timeout_ = timeout;
  dht::ServiceOptions options;
  options.initial_peers = std::move(initial_peers);
  options.client_only = true;
  options.join_timeout = timeout;
  options.listen = {"::", 0};
  auto service = dht::Service::start(client->io_.context(), identity, options);
  if (!service) {  // A machine without IPv6.
    options.listen = {"0.0.0.0", 0};
    service = dht::Service::start(client->io_.context(), identity, options);
  }
  if (!service) return service.error();
  client->service_ = *std::move(service);
  return client;
}

Result<void> DhtClient::join() {
  return wait_for<Result<void>>([this](auto handler) { service_->join(std::move(handler)); });
}

Result<dht::StoreReport> DhtClient::store(dht::StoreRequest request) { return node().store(std::move(request)); }

Result<dht::FindResult> DhtClient::find_all(const dht::Key& key) {
  dht::FindOptions options;
  options.quorum = 0;
  options.allow_cached = false;
  options.deadline = std::chrono::steady_clock::now() + timeout_;
  return node().find(key, options);
}

Result<dht::PingReport> DhtClient::ping_once(const std::vector<dht::Address>& addresses) {
  return wait_for<Result<dht::PingReport>>([&](auto handler) {
    dht::Node& node = service_->node();
    node.clock().post([&node, addresses, handler = std::move(handler)] {
      const auto open = std::make_shared<std::size_t>(addresses.size());  // 0 once the handler has run.
      for (const dht::Address& address : addresses) {
        node.ping(address, [open, handler](Result<dht::PingReport> answer) {
          if (*open == 0) return;
          *open = answer ? 0 : *open - 1;
          if (*open == 0) handler(std::move(answer));
        });
      }
    });
  });
}

Result<dht::PingReport> DhtClient::ping(const std::vector<dht::Address>& addresses) {
  const auto deadline = std::chrono::steady_clock::now() + timeout_;
  auto answer = ping_once(addresses);
  while (!answer && std::chrono::steady_clock::now() < deadline) answer = ping_once(addresses);
  return answer;
}

std::size_t DhtClient::count_nearest() {
  return wait_for<std::size_t>([this](auto handler) {
    dht::Node& node = service_->node();
    node.clock().post([&node, handler = std::move(handler)] {
      node.nearest(node.id().bytes, [handler](const auto& nodes) { handler(nodes.size()); });
    });
  });
}

dht::ServiceStats DhtClient::stats() {
  return wait_for<dht::ServiceStats>([this](auto handler) { service_->stats(std::move(handler)); });
}

Result<std::vector<dht::Address>> resolve(const net::Endpoint& endpoint) {
  asio::io_context io;
  asio::ip::udp::resolver resolver(io);
  boost::system::error_code error;
  const auto found =
      resolver.resolve(endpoint.host, std::to_string(endpoint.port), asio::ip::udp::resolver::numeric_service, error);
  if (error) {
    return Error{Errc::kUnavailable, "cannot resolve the name '" + endpoint.host + "': " + error.message(), {}};
  }
  std::vector<dht::Address> addresses;
  for (const auto& entry : found) {
    const dht::Address address = dht::to_address(entry.endpoint());
    if (std::find(addresses.begin(), addresses.end(), address) == addresses.end()) addresses.push_back(address);
  }
  return addresses;
}

}  // namespace dmoe::cli
