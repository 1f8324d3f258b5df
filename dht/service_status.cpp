#include "dht/service_status.hpp"

#include <prometheus/gauge.h>
#include <nlohmann/json.hpp>

#include <utility>

namespace dmoe::dht {

ServiceStatus::ServiceStatus(net::Metrics& metrics, std::string peer_id)
    : metrics_(metrics), peer_id_(std::move(peer_id)) {
  metrics_.before_serialize([this] { refresh_gauges(); });
  refresh_gauges();
}

void ServiceStatus::watch(Service& service) {
  service_ = &service;
  refresh();
}

ServiceStats ServiceStatus::refresh() {
  if (Service* service = service_) {
    service->stats([latest = latest_](const ServiceStats& stats) {
      const std::lock_guard lock(latest->mutex);
      latest->stats = stats;
    });
  }
  const std::lock_guard lock(latest_->mutex);
  return latest_->stats;
}

void ServiceStatus::refresh_gauges() {
  const ServiceStats stats = refresh();
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

net::HttpResponse ServiceStatus::describe(bool ready) {
  const ServiceStats stats = refresh();
  const nlohmann::ordered_json json{{"peer_id", peer_id_},
                                    {"ready", ready},
                                    {"nodes_known", stats.known_nodes},
                                    {"records_held", stats.stored_records},
                                    {"datagrams_sent", stats.datagrams_sent},
                                    {"datagrams_received", stats.datagrams_received},
                                    {"datagrams_refused", stats.datagrams_refused}};
  return {200, "application/json", json.dump() + "\n"};
}

}  // namespace dmoe::dht
