#include "net/metrics.hpp"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <mutex>
#include <utility>

namespace dmoe::net {

struct Metrics::Impl {
  prometheus::Registry registry;
  mutable std::mutex mutex;  // Leaf; guards refreshers.
  std::vector<std::function<void()>> refreshers;
};

Metrics::Metrics() : impl_(std::make_unique<Impl>()) {}
Metrics::~Metrics() = default;

prometheus::Counter& Metrics::counter(const std::string& name, const std::string& help, const Labels& labels) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(impl_->registry).Add(labels);
}

prometheus::Gauge& Metrics::gauge(const std::string& name, const std::string& help, const Labels& labels) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(impl_->registry).Add(labels);
}

prometheus::Histogram& Metrics::histogram(const std::string& name, const std::string& help,
                                          const std::vector<double>& bounds, const Labels& labels) {
  return prometheus::BuildHistogram().Name(name).Help(help).Register(impl_->registry).Add(labels, bounds);
}

void Metrics::before_serialize(std::function<void()> refresh) {
  const std::lock_guard lock(impl_->mutex);
  impl_->refreshers.push_back(std::move(refresh));
}

std::string Metrics::serialize() const {
  std::vector<std::function<void()>> refreshers;
  {
    const std::lock_guard lock(impl_->mutex);
    refreshers = impl_->refreshers;
  }
  for (const auto& refresh : refreshers) refresh();
  return prometheus::TextSerializer{}.Serialize(impl_->registry.Collect());
}

RpcServer::HttpHandler metrics_route(const Metrics& metrics) {
  return [&metrics] { return HttpResponse{200, "text/plain; version=0.0.4; charset=utf-8", metrics.serialize()}; };
}

}  // namespace dmoe::net
