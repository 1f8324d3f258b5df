#include "expert_server/server_metrics.hpp"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>

#include <string>

namespace dmoe::expert_server {
namespace {

const std::vector<double> kRowBuckets{1, 4, 16, 64, 256, 1'024, 4'096, 16'384};
const std::vector<double> kSecondBuckets{0.0001, 0.001, 0.005, 0.02, 0.1, 0.5, 2, 10};

std::size_t index(Direction direction) { return direction == Direction::kForward ? 0 : 1; }

}  // namespace

ServerMetrics::ServerMetrics(net::Metrics& metrics)
    : meters_(metrics),
      updates_(metrics.counter("dmoe_expert_updates_total", "Optimizer steps.")),
      dropped_(metrics.counter("dmoe_expert_calls_dropped_total",
                               "Calls whose deadline passed, or whose caller left, before the device was asked.")),
      checkpoints_written_(metrics.counter("dmoe_checkpoints_total", "Checkpoints by outcome.", {{"outcome", "ok"}})),
      checkpoints_failed_(
          metrics.counter("dmoe_checkpoints_total", "Checkpoints by outcome.", {{"outcome", "failed"}})),
      checkpoint_seconds_(metrics.gauge("dmoe_checkpoint_seconds", "How long the last checkpoint took to write.")),
      queued_calls_(metrics.gauge("dmoe_expert_queued_calls", "Calls that wait for the device.")),
      queued_rows_(metrics.gauge("dmoe_expert_queued_rows", "Rows that wait for the device.")),
      experts_(metrics.gauge("dmoe_experts", "Experts hosted now.")),
      gradient_norm_(metrics.gauge("dmoe_expert_gradient_norm", "2-norm of the latest gradient, before clipping.")),
      staleness_(metrics.histogram("dmoe_expert_staleness_updates",
                                   "Updates between a call's forward and backward pass, mean over a batch.",
                                   {0, 1, 2, 4, 8, 16, 64, 256})),
      evictions_{&metrics.counter("dmoe_expert_evictions_total", "Experts put on disk.", {{"outcome", "ok"}}),
                 &metrics.counter("dmoe_expert_evictions_total", "Experts put on disk.", {{"outcome", "failed"}})},
      revivals_{&metrics.counter("dmoe_expert_revivals_total", "Experts read back.", {{"outcome", "ok"}}),
                &metrics.counter("dmoe_expert_revivals_total", "Experts read back.", {{"outcome", "failed"}})},
      revival_seconds_(metrics.gauge("dmoe_expert_revival_seconds", "How long the last reading back took.")) {
  for (const auto direction : {Direction::kForward, Direction::kBackward}) {
    const std::string name = direction == Direction::kForward ? "forward" : "backward";
    auto& own = directions_[index(direction)];
    for (std::size_t i = 0; i < kOutcomes; ++i) {
      const std::string outcome = i == 0 ? "ok" : std::string(to_string(static_cast<Errc>(i)));
      own.calls[i] = &metrics.counter("dmoe_expert_calls_total", "Calls to experts by outcome.",
                                      {{"direction", name}, {"outcome", outcome}});
    }
    own.rows = &metrics.counter("dmoe_expert_rows_total", "Rows computed.", {{"direction", name}});
    own.device_seconds =
        &metrics.counter("dmoe_expert_device_seconds_total", "Time the device thread computed.", {{"direction", name}});
    own.batch_rows =
        &metrics.histogram("dmoe_expert_batch_rows", "Rows of a batch.", kRowBuckets, {{"direction", name}});
    const std::string bytes = "Bytes of tensors, in calls and in answers.";
    own.bytes_in = &metrics.counter("dmoe_expert_bytes_total", bytes, {{"direction", name}, {"way", "in"}});
    own.bytes_out = &metrics.counter("dmoe_expert_bytes_total", bytes, {{"direction", name}, {"way", "out"}});
    own.queue_seconds = &metrics.histogram("dmoe_expert_queue_seconds", "How long a batch's oldest call waited.",
                                           kSecondBuckets, {{"direction", name}});
  }
}

void ServerMetrics::answered(Direction direction, const Error* error) {
  const auto outcome = error == nullptr ? 0 : static_cast<std::size_t>(error->code);
  if (outcome < kOutcomes) directions_[index(direction)].calls[outcome]->Increment();
}

void ServerMetrics::received(Direction direction, std::uint64_t bytes) {
  directions_[index(direction)].bytes_in->Increment(static_cast<double>(bytes));
}

void ServerMetrics::sent(Direction direction, std::uint64_t bytes) {
  directions_[index(direction)].bytes_out->Increment(static_cast<double>(bytes));
}

void ServerMetrics::batch(const BatchReport& report) {
  auto& own = directions_[index(report.direction)];
  const double seconds = std::chrono::duration<double>(report.computed).count();
  own.rows->Increment(static_cast<double>(report.rows));
  own.device_seconds->Increment(seconds);
  own.batch_rows->Observe(static_cast<double>(report.rows));
  own.queue_seconds->Observe(std::chrono::duration<double>(report.waited).count());
  updates_.Increment(static_cast<double>(report.updates));
  if (report.updates > 0) gradient_norm_.Set(report.backend->last_gradient_norm());
  if (report.staleness_calls > 0) {
    staleness_.Observe(static_cast<double>(report.staleness) / static_cast<double>(report.staleness_calls));
  }
  if (report.expert != nullptr && report.expert->meters != nullptr) report.expert->meters->batch(report);
}

void ServerMetrics::dropped(std::size_t tasks) { dropped_.Increment(static_cast<double>(tasks)); }

void ServerMetrics::checkpoint(bool written, double seconds) {
  (written ? checkpoints_written_ : checkpoints_failed_).Increment();
  checkpoint_seconds_.Set(seconds);
}

void ServerMetrics::evicted(bool done) { evictions_[done ? 0 : 1]->Increment(); }

void ServerMetrics::revived(bool done, double seconds) {
  revivals_[done ? 0 : 1]->Increment();
  revival_seconds_.Set(seconds);
}

void ServerMetrics::set_load(const Runtime::Load& load, std::size_t experts) {
  queued_calls_.Set(static_cast<double>(load.tasks));
  queued_rows_.Set(static_cast<double>(load.rows));
  experts_.Set(static_cast<double>(experts));
}

}  // namespace dmoe::expert_server
