// What plain HTTP shows of a server.
#pragma once

#include "expert_server/expert_host.hpp"
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
};

/// /healthz (200 while the process answers), /readyz (503 until announced), /metrics, /api/v1/status, /api/v1/experts.
void add_status_routes(net::RpcServer& server, const StatusSources& sources);

}  // namespace dmoe::expert_server
