// Counters, gauges and histograms that /metrics shows, in Prometheus' text format.
#pragma once

#include "net/rpc_server.hpp"

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace prometheus {
class Counter;
class Gauge;
class Histogram;
class Registry;
}  // namespace prometheus

namespace dmoe::net {

using Labels = std::map<std::string, std::string>;

/// One registry per process or per test; nothing is global. Thread-safe. What it hands out lives as long as it does,
/// and is the same object for the same name and labels: keep the reference, the look-up takes a lock.
class Metrics {
 public:
  Metrics();
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  /// `name` as Prometheus wants it: "dmoe_rpc_calls_total". `help` is one sentence; the first one given stays.
  prometheus::Counter& counter(const std::string& name, const std::string& help, const Labels& labels = {});
  prometheus::Gauge& gauge(const std::string& name, const std::string& help, const Labels& labels = {});
  /// `bounds`: ascending upper bounds of the buckets, in the unit that `name` ends with.
  prometheus::Histogram& histogram(const std::string& name, const std::string& help, const std::vector<double>& bounds,
                                   const Labels& labels = {});

  /// Called before each serialize(), on its thread: the place to set gauges from state kept elsewhere.
  void before_serialize(std::function<void()> refresh);

  std::string serialize() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The handler for `server.route("/metrics", metrics_route(metrics))`; `metrics` outlives the server.
RpcServer::HttpHandler metrics_route(const Metrics& metrics);

}  // namespace dmoe::net
