// What a server counts about its experts, for /metrics.
#pragma once

#include "expert_server/expert_meters.hpp"
#include "expert_server/runtime.hpp"
#include "net/metrics.hpp"

#include <array>
#include <cstddef>

namespace dmoe::expert_server {

/// Thread-safe.
class ServerMetrics {
 public:
  explicit ServerMetrics(net::Metrics& metrics);

  void answered(Direction direction, const Error* error);   ///< `error`: null for success.
  void received(Direction direction, std::uint64_t bytes);  ///< Of a call's tensors.
  void sent(Direction direction, std::uint64_t bytes);      ///< Of an answer's tensors.
  void batch(const BatchReport& report);
  void dropped(std::size_t tasks);
  void checkpoint(bool written, double seconds);
  void evicted(bool done);  ///< False: the disk refused.
  void revived(bool done, double seconds);
  ExpertMeters& expert(const std::string& uid) { return meters_.of(uid); }
  void clear_queued() { meters_.clear_queued(); }
  void set_load(const Runtime::Load& load, std::size_t experts);

 private:
  static constexpr std::size_t kOutcomes = 9;  ///< Success, and each Errc by its number.

  struct PerDirection {
    std::array<prometheus::Counter*, kOutcomes> calls{};
    prometheus::Counter* rows = nullptr;
    prometheus::Counter* device_seconds = nullptr;
    prometheus::Histogram* batch_rows = nullptr;
    prometheus::Histogram* queue_seconds = nullptr;
    prometheus::Counter* bytes_in = nullptr;
    prometheus::Counter* bytes_out = nullptr;
  };

  ExpertMeterTable meters_;
  std::array<PerDirection, 2> directions_;
  prometheus::Counter& updates_;
  prometheus::Counter& dropped_;
  prometheus::Counter& checkpoints_written_;
  prometheus::Counter& checkpoints_failed_;
  prometheus::Gauge& checkpoint_seconds_;
  prometheus::Gauge& queued_calls_;
  prometheus::Gauge& queued_rows_;
  prometheus::Gauge& experts_;
  prometheus::Gauge& gradient_norm_;
  prometheus::Histogram& staleness_;
  std::array<prometheus::Counter*, 2> evictions_;  ///< Done, failed.
  std::array<prometheus::Counter*, 2> revivals_;
  prometheus::Gauge& revival_seconds_;
};

}  // namespace dmoe::expert_server
