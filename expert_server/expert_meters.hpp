// What is counted of one expert, for /metrics.
#pragma once

#include "expert_server/task.hpp"
#include "net/metrics.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace dmoe::expert_server {

struct BatchReport;

/// Thread-safe. Outlives the expert: calls that are answered late still count.
class ExpertMeters {
 public:
  ExpertMeters(net::Metrics& metrics, std::string label);

  void batch(const BatchReport& report);
  void received(Direction direction, std::uint64_t bytes);
  void answered(Direction direction, std::uint64_t bytes);
  void failed(const Error& error);
  void add_queued(Direction direction, std::size_t calls);
  void clear_queued();

 private:
  struct PerDirection {
    prometheus::Gauge* queued = nullptr;
    prometheus::Counter* batches = nullptr;
    prometheus::Counter* rows = nullptr;
    prometheus::Counter* calls = nullptr;
    prometheus::Counter* wait_seconds = nullptr;
    prometheus::Counter* device_seconds = nullptr;
    prometheus::Counter* bytes_in = nullptr;
    prometheus::Counter* bytes_out = nullptr;
  };
  PerDirection& of(Direction direction) { return directions_[direction == Direction::kForward ? 0 : 1]; }

  net::Metrics& metrics_;
  std::string label_;
  std::array<PerDirection, 2> directions_;
  prometheus::Counter* updates_;
  prometheus::Gauge* gradient_norm_;
  prometheus::Counter* staleness_;
  prometheus::Counter* staleness_samples_;
};

/// The meters of every expert that a server ever hosted. Thread-safe.
///
/// The first `kMaxLabelled` have their UID as label, all others share the label "other": who scrapes a server is never
/// sent more series than that, however many experts come and go.
class ExpertMeterTable {
 public:
  static constexpr std::size_t kMaxLabelled = 256;

  explicit ExpertMeterTable(net::Metrics& metrics, std::size_t max_labelled = kMaxLabelled)
      : metrics_(metrics), max_labelled_(max_labelled) {}
  ExpertMeters& of(const std::string& uid);  ///< The same object for the same expert.
  void clear_queued();

 private:
  net::Metrics& metrics_;
  std::size_t max_labelled_;
  std::mutex mutex_;
  std::map<std::string, std::unique_ptr<ExpertMeters>> meters_;  // Guarded by mutex_.
};

}  // namespace dmoe::expert_server
