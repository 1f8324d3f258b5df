#include "cli/dht_node.hpp"

#include <chrono>
#include <future>
#include <utility>

namespace dmoe::cli {
namespace {

constexpr int kPortAttempts = 16;  ///< A port that is free for TCP may be taken for UDP; then another one is tried.
constexpr const char* kText = "text/plain; charset=utf-8";

void refuse(net::IncomingCall call) {
  call.fail({Errc::kNotFound, "this is a DHT node without experts; ask the DHT who hosts the expert", {}});
}

}  // namespace

DhtNode::DhtNode(const net::Identity& identity) : status_(metrics_, net::to_string(identity.peer_id())) {}

DhtNode::~DhtNode() { stop(); }

Result<std::unique_ptr<DhtNode>> DhtNode::start(const net::Identity& identity, const dht::ServiceOptions& options) {
  for (int attempt = 1;; ++attempt) {
    std::unique_ptr<DhtNode> node(new DhtNode(identity));
    const auto bound = node->bind(identity, options);
    if (bound) return node;
    const bool another_port_may_do = options.listen.port == 0 && bound.error().code == Errc::kUnavailable;
    if (!another_port_may_do || attempt == kPortAttempts) return bound.error();
  }
}

Result<void> DhtNode::bind(const net::Identity& identity, dht::ServiceOptions options) {
  net::RpcServerOptions http;
  http.listen = options.listen;
  http_ = std::make_unique<net::RpcServer>(io_.context(), http, &refuse);
  add_routes();
  if (const auto listening = http_->listen(); !listening) return listening.error();
  options.listen.port = http_->port();
  auto service = dht::Service::start(io_.context(), identity, std::move(options));
  if (!service) return service.error();
  service_ = *std::move(service);
  status_.watch(*service_);
  return {};
}

void DhtNode::add_routes() {
  http_->route("/healthz", [] { return net::HttpResponse{200, kText, "ok\n"}; });
  http_->route("/readyz", [this] {
    return ready_.load() ? net::HttpResponse{200, kText, "ready\n"}
                         : net::HttpResponse{503, kText, "still joining the network\n"};
  });
  http_->route("/api/v1/dht", [this] { return status_.describe(ready_.load()); });
  http_->route("/metrics", net::metrics_route(metrics_));
}

void DhtNode::stop() {
  if (auto http = std::exchange(http_, nullptr)) {
    // Waits for the sessions to go: a request for /metrics that is being answered uses the service.
    const auto gone = std::make_shared<std::promise<void>>();
    http->stop(std::chrono::milliseconds{0}, [gone] { gone->set_value(); });
    gone->get_future().wait();
  }
  if (service_) service_->stop();
}

}  // namespace dmoe::cli
