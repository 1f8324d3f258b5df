// What plain HTTP shows of a DHT node.
#pragma once

#include "dht/service.hpp"
#include "net/metrics.hpp"
#include "net/rpc_server.hpp"

#include <atomic>
#include <memory>
#include <mutex>
#include <string>

namespace dmoe::dht {

/// The node's figures as JSON and as gauges. Thread-safe. It never waits for the node: it shows the latest snapshot,
/// after asking for a newer one, which an idle node takes at once.
class ServiceStatus {
 public:
  /// `metrics` outlives this, and serializes only while this lives.
  ServiceStatus(net::Metrics& metrics, std::string peer_id);

  /// From now on; until then all figures are 0. `service` is valid as long as anything is shown.
  void watch(Service& service);
  /// GET /api/v1/dht, which `dmoe dht stats` reads.
  net::HttpResponse describe(bool ready);

 private:
  ServiceStats refresh();
  void refresh_gauges();

  /// Shared with snapshots under way; the node's strand writes it.
  struct Latest {
    std::mutex mutex;
    ServiceStats stats;
  };

  net::Metrics& metrics_;
  const std::string peer_id_;
  std::atomic<Service*> service_{nullptr};
  const std::shared_ptr<Latest> latest_ = std::make_shared<Latest>();
};

}  // namespace dmoe::dht
