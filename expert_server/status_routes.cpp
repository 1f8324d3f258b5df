#include "expert_server/status_routes.hpp"

#include <nlohmann/json.hpp>

namespace dmoe::expert_server {
namespace {

using OrderedJson = nlohmann::ordered_json;

net::HttpResponse json_response(const OrderedJson& json) { return {200, "application/json", json.dump() + "\n"}; }

net::HttpResponse readiness(const StatusSources& sources) {
  if (sources.ready) return {200, "text/plain; charset=utf-8", "ready\n"};
  return {503, "text/plain; charset=utf-8", "not ready: experts are not announced\n"};
}

/// null: nobody could tell.
OrderedJson reachable(dht::Reach reach) {
  return reach == dht::Reach::kUnknown ? OrderedJson() : OrderedJson(reach == dht::Reach::kReachable);
}

OrderedJson endpoints(const StatusSources& sources) {
  auto list = OrderedJson::array();
  const ReachCheck* reach = sources.reach;
  if (reach == nullptr) return list;
  for (const auto& [endpoint, known] : reach->latest()) {
    list.push_back({{"endpoint", net::to_string(endpoint)}, {"reachable", reachable(known)}});
  }
  return list;
}

net::HttpResponse status(const StatusSources& sources) {
  const auto load = sources.host.runtimes().load();
  return json_response({{"peer_id", sources.peer_id},
                        {"ready", sources.ready.load()},
                        {"endpoints", endpoints(sources)},
                        {"experts", sources.host.table().uids().size()},
                        {"queued_calls", load.tasks},
                        {"queued_rows", load.rows}});
}

net::HttpResponse experts(const StatusSources& sources) {
  auto list = OrderedJson::array();
  for (const auto& expert : sources.host.table().all()) {
    const auto& backend = *expert->backend;
    const auto& runtime = sources.host.runtimes().of(*expert);
    list.push_back({{"uid", backend.uid_text()},
                    {"architecture", backend.description().architecture},
                    {"hidden_dim", backend.description().hidden_dim},
                    {"max_batch_size", backend.max_batch_size()},
                    {"updates", backend.updates()},
                    {"device", backend.device().str()},
                    {"runtime", expert->runtime},
                    {"resident", runtime.is_resident(*expert)},
                    {"queued_forward", runtime.load(*expert, Direction::kForward).tasks},
                    {"queued_backward", runtime.load(*expert, Direction::kBackward).tasks},
                    {"gradient_norm", backend.last_gradient_norm()}});
  }
  return json_response(list);
}

}  // namespace

void add_status_routes(net::RpcServer& server, const StatusSources& sources) {
  server.route("/healthz", [] { return net::HttpResponse{200, "text/plain; charset=utf-8", "ok\n"}; });
  server.route("/readyz", [&sources] { return readiness(sources); });
  server.route("/metrics", net::metrics_route(sources.metrics));
  server.route("/api/v1/status", [&sources] { return status(sources); });
  server.route("/api/v1/dht", [&sources] { return sources.dht.describe(sources.ready.load()); });
  server.route("/api/v1/experts", [&sources] { return experts(sources); });
}

}  // namespace dmoe::expert_server
