// What plain HTTP shows of a server.
#pragma once

#include "dht/service_status.hpp"
#include "expert_server/expert_host.hpp"
#include "expert_server/reach_check.hpp"
#include "net/metrics.hpp"
#include "net/rpc_server.hpp"

#include <atomic>

namespace dmoe::expert_server {

/// What the routes read. Outlives the server that has them.
struct StatusSources {
  const net::Metrics& metrics;
  ExpertHost& host;
  std::atomic<bool> ready{false};  ///< Announced, and not stopping.
  std::string peer_id;
  dht::ServiceStatus& dht;
  std::atomic<const ReachCheck*> reach{nullptr};  ///< Once the endpoints are known.
};

/// /healthz (200 while the process answers), /readyz (503 until announced), /metrics, /api/v1/status, /api/v1/experts,
/// /api/v1/dht.
void add_status_routes(net::RpcServer& server, const StatusSources& sources);

}  // namespace dmoe::expert_server
