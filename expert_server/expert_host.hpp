// The experts of one server: loading, unloading, checkpoints.
#pragma once

#include "expert_server/checkpoint_store.hpp"
#include "expert_server/expert_residency.hpp"
#include "expert_server/expert_table.hpp"
#include "expert_server/runtimes.hpp"
#include "expert_server/server.hpp"
#include "expert_server/server_metrics.hpp"

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace dmoe::expert_server {

struct ExpertHostOptions {
  ExpertOptions expert;
  TaskPoolOptions pool;
  std::optional<std::filesystem::path> checkpoints;  ///< Unset: nothing is kept.
  std::size_t keep_checkpoints = 3;
  std::uint64_t max_disk = 0;  ///< Bytes of all checkpoints together; 0: no limit.
  bool reset_optimizer = false;
  std::vector<c10::Device> devices;  ///< Empty: one CPU.
  int compute_threads = 0;
  bool grouped = true;
  std::size_t max_resident = 0;  ///< Experts in memory; needs checkpoints. 0: all.
  std::uint64_t seed = 0;
};

/// Thread-safe. What touches the disk blocks; not on an io thread.
class ExpertHost {
 public:
  ExpertHost(ExpertHostOptions options, ServerMetrics& metrics);
  ~ExpertHost();  ///< As stop() without grace.
  ExpertHost(const ExpertHost&) = delete;
  ExpertHost& operator=(const ExpertHost&) = delete;

  const ExpertTable& table() const noexcept { return table_; }
  ExpertTable& table() noexcept { return table_; }
  Runtimes& runtimes() noexcept { return runtimes_; }
  const Runtimes& runtimes() const noexcept { return runtimes_; }

  /// Experts that have a checkpoint here, hosted or not.
  std::vector<ExpertUid> stored();
  /// Makes an expert, from its checkpoint if it has one (see make_expert), and serves it from now on.
  Result<void> load(const ExpertUid& uid);
  /// Stops serving an expert; what it learned since its last checkpoint is written first.
  void unload(const ExpertUid& uid);

  /// Writes every expert that changed since its last checkpoint. Each is a consistent copy, taken between two batches;
  /// the device goes on while it is written. @return the first failure; the others are tried all the same.
  Result<void> checkpoint();

  /// See Runtime::stop; afterwards `checkpoint` still works.
  void stop(std::chrono::milliseconds grace);

 private:
  Result<void> place(HostedExpert& expert);
  Result<void> make_room();
  Result<void> evict(const std::shared_ptr<HostedExpert>& expert);
  void revive(const std::shared_ptr<HostedExpert>& expert);
  Result<void> save_if_changed(const std::shared_ptr<HostedExpert>& expert);
  std::shared_ptr<const ExpertSnapshot> snapshot_of(const std::shared_ptr<HostedExpert>& expert);

  ExpertHostOptions options_;
  ServerMetrics& metrics_;
  ExpertTable table_;
  std::mutex disk_mutex_;                 ///< Taken for the disk alone: neither calls nor the device ever wait for it.
  std::optional<CheckpointStore> store_;  // Guarded by disk_mutex_.
  std::map<ExpertUid, std::uint64_t> saved_;  // Guarded by disk_mutex_: updates at the last checkpoint.
  ExpertResidency residency_;  ///< runtimes_ call it; its thread, which uses all of this, ends in stop().
  Runtimes runtimes_;
};

}  // namespace dmoe::expert_server
