#include "cli/dht_node.hpp"

#include <prometheus/gauge.h>
#include <nlohmann/json.hpp>

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

DhtNode::DhtNode() = default;

DhtNode::~DhtNode() { stop(); }

Result<std::unique_ptr<DhtNode>> DhtNode::start(const net::Identity& identity, const dht::ServiceOptions& options) {
  for (int attempt = 1;; ++attempt) {
    std::unique_ptr<DhtNode> node(new DhtNode);
    const auto bound = node->bind(identity, options);
    if (bound) return node;
    const bool another_port_may_do = options.listen.port == 0 && bound.error().code == Errc::kUnavailable;
    if (!another_port_may_do || attempt == kPortAttempts) return bound.error();
  }
}

Result<void> DhtNode::bind(const net::Identity& identity, dht::ServiceOptions options) {
  peer_id_ = net::to_string(identity.peer_id());
  net::RpcServerOptions http;
  http.listen = options.listen;
  http_ = std::make_unique<net::RpcServer>(io_.context(), http, &refuse);
  add_routes();
  if (const auto listening = http_->listen(); !listening) return listening.error();
  options.listen.port = http_->port();
  auto service = dht::Service::start(io_.context(), identity, std::move(options));
  if (!service) return service.error();
  service_ = *std::move(service);
  refresh_metrics();
  return {};
}

void DhtNode::add_routes() {
  http_->route("/healthz", [] { return net::HttpResponse{200, kText, "ok\n"}; });
  http_->route("/readyz", [this] {
    return ready_.load() ? net::HttpResponse{200, kText, "ready\n"}
                         : net::HttpResponse{503, kText, "still joining the network\n"};
  });
  http_->route("/api/v1/dht", [this] { return describe(); });
  http_->route("/metrics", net::metrics_route(metrics_));
  metrics_.before_serialize([this] { refresh_metrics(); });
}

/// The latest snapshot, after asking for a newer one: an idle node's strand takes it at once on this thread. Waiting
/// for a busy one would hold up the thread that makes it.
dht::ServiceStats DhtNode::refresh_stats() {
  if (service_) {
    service_->stats([stats = stats_](const dht::ServiceStats& latest) {
      const std::lock_guard lock(stats->mutex);
      stats->latest = latest;
    });
  }
  const std::lock_guard lock(stats_->mutex);
  return stats_->latest;
}

void DhtNode::refresh_metrics() {
  const dht::ServiceStats stats = refresh_stats();
  const auto show = [this](const char* name, const char* help, auto value) {
    metrics_.gauge(name, help).Set(static_cast<double>(value));
  };
  show("dmoe_dht_known_nodes", "Nodes in the routing table.", stats.known_nodes);
  show("dmoe_dht_stored_records", "Records held for the network.", stats.stored_records);
  show("dmoe_dht_datagrams_sent", "Datagrams sent since the start.", stats.datagrams_sent);
  show("dmoe_dht_datagrams_received", "Datagrams received since the start.", stats.datagrams_received);
  show("dmoe_dht_datagrams_refused", "Datagrams that were malformed, over a limit or badly signed.",
       stats.datagrams_refused);
}

/// For `dmoe dht stats`, and whoever prefers JSON to /metrics.
net::HttpResponse DhtNode::describe() {
  const dht::ServiceStats stats = refresh_stats();
  const nlohmann::ordered_json json{{"peer_id", peer_id_},
                                    {"ready", ready_.load()},
                                    {"nodes_known", stats.known_nodes},
                                    {"records_held", stats.stored_records},
                                    {"datagrams_sent", stats.datagrams_sent},
                                    {"datagrams_received", stats.datagrams_received},
                                    {"datagrams_refused", stats.datagrams_refused}};
  return {200, "application/json", json.dump() + "\n"};
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
