#include "expert_server/expert_meters.hpp"

#include "expert_server/runtime.hpp"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>

#include <utility>

namespace dmoe::expert_server {
namespace {

double seconds(std::chrono::nanoseconds time) { return std::chrono::duration<double>(time).count(); }

constexpr const char* kOther = "other";

}  // namespace

ExpertMeters::ExpertMeters(net::Metrics& metrics, std::string label) : metrics_(metrics), label_(std::move(label)) {
  const net::Labels expert{{"expert", label_}};
  for (const auto direction : {Direction::kForward, Direction::kBackward}) {
    const net::Labels labels{{"expert", label_},
                             {"direction", direction == Direction::kForward ? "forward" : "backward"}};
    auto in = labels;
    auto out = labels;
    in["way"] = "in";
    out["way"] = "out";
    auto& own = of(direction);
    own.queued = &metrics.gauge("dmoe_per_expert_queued_calls", "Calls that wait for the expert.", labels);
    own.batches = &metrics.counter("dmoe_per_expert_batches_total", "Batches computed.", labels);
    own.rows = &metrics.counter("dmoe_per_expert_rows_total", "Rows computed.", labels);
    own.calls = &metrics.counter("dmoe_per_expert_calls_total", "Calls computed.", labels);
    own.wait_seconds = &metrics.counter("dmoe_per_expert_wait_seconds_total", "Time calls waited, summed.", labels);
    own.device_seconds = &metrics.counter("dmoe_per_expert_device_seconds_total", "Time computing took.", labels);
    own.bytes_in = &metrics.counter("dmoe_per_expert_bytes_total", "Bytes of tensors, in calls and in answers.", in);
    own.bytes_out = &metrics.counter("dmoe_per_expert_bytes_total", "Bytes of tensors, in calls and in answers.", out);
  }
  updates_ = &metrics.counter("dmoe_per_expert_updates_total", "Optimizer steps.", expert);
  gradient_norm_ =
      &metrics.gauge("dmoe_per_expert_gradient_norm", "2-norm of the last step's gradient, before clipping.", expert);
  staleness_ = &metrics.counter("dmoe_per_expert_staleness_updates_total",
                                "Updates between a call's forward and backward pass, summed.", expert);
  staleness_samples_ =
      &metrics.counter("dmoe_per_expert_staleness_calls_total", "Backward calls whose forward pass was known.", expert);
}

void ExpertMeters::batch(const BatchReport& report) {
  auto& own = of(report.direction);
  own.batches->Increment();
  own.rows->Increment(static_cast<double>(report.rows));
  own.calls->Increment(static_cast<double>(report.tasks));
  own.wait_seconds->Increment(seconds(report.waited_in_total));
  own.device_seconds->Increment(seconds(report.computed));
  if (report.updates == 0) return;
  updates_->Increment(static_cast<double>(report.updates));
  gradient_norm_->Set(report.backend->last_gradient_norm());
  staleness_->Increment(static_cast<double>(report.staleness));
  staleness_samples_->Increment(static_cast<double>(report.staleness_calls));
}

void ExpertMeters::received(Direction direction, std::uint64_t bytes) {
  of(direction).bytes_in->Increment(static_cast<double>(bytes));
}

void ExpertMeters::answered(Direction direction, std::uint64_t bytes) {
  of(direction).bytes_out->Increment(static_cast<double>(bytes));
}

void ExpertMeters::failed(const Error& error) {
  metrics_
      .counter("dmoe_per_expert_errors_total", "Calls that failed, by code.",
               {{"expert", label_}, {"code", std::string(to_string(error.code))}})
      .Increment();
}

void ExpertMeters::add_queued(Direction direction, std::size_t calls) {
  of(direction).queued->Increment(static_cast<double>(calls));
}

void ExpertMeters::clear_queued() {
  for (auto& own : directions_) own.queued->Set(0);
}

ExpertMeters& ExpertMeterTable::of(const std::string& uid) {
  const std::lock_guard lock(mutex_);
  const auto known = meters_.find(uid);
  if (known != meters_.end()) return *known->second;
  const bool own = meters_.size() < max_labelled_;
  auto& slot = meters_[own ? uid : kOther];
  if (!slot) slot = std::make_unique<ExpertMeters>(metrics_, own ? uid : kOther);
  return *slot;
}

void ExpertMeterTable::clear_queued() {
  const std::lock_guard lock(mutex_);
  for (auto& entry : meters_) entry.second->clear_queued();
}

}  // namespace dmoe::expert_server
