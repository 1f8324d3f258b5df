#include "expert_server/expert_host.hpp"

#include "expert_server/arrival.hpp"
#include "expert_server/expert_factory.hpp"

#include <spdlog/spdlog.h>

#include <chrono>
#include <utility>

namespace dmoe::expert_server {
namespace {

/// Longer than any batch; it bounds a wait for a device that hangs.
constexpr std::chrono::minutes kSnapshotLimit{10};

RuntimeOptions runtime_options(int compute_threads, ServerMetrics& metrics) {
  return {.compute_threads = compute_threads,
          .on_batch = [&metrics](const BatchReport& report) { metrics.batch(report); },
          .on_dropped = [&metrics](std::size_t tasks) { metrics.dropped(tasks); }};
}

}  // namespace

ExpertHost::ExpertHost(ExpertHostOptions options, ServerMetrics& metrics)
    : options_(std::move(options)), metrics_(metrics), runtime_(runtime_options(options_.compute_threads, metrics)) {
  if (options_.checkpoints) store_.emplace(*options_.checkpoints, options_.keep_checkpoints);
}

std::vector<ExpertUid> ExpertHost::stored() {
  const std::lock_guard lock(disk_mutex_);
  return store_ ? store_->stored() : std::vector<ExpertUid>{};
}

Result<void> ExpertHost::load(const ExpertUid& uid) {
  const std::lock_guard lock(disk_mutex_);
  bool restored = false;
  auto backend = make_expert(uid, options_.expert, store_ ? &*store_ : nullptr, options_.reset_optimizer, options_.seed,
                             &restored);
  if (!backend) return backend.error();
  if (restored) saved_[uid] = (*backend)->updates();
  auto pool = options_.pool;
  pool.one_task_at_a_time = (*backend)->one_task_at_a_time();
  table_.add(std::make_shared<HostedExpert>(std::move(*backend), pool));
  return {};
}

void ExpertHost::unload(const ExpertUid& uid) {
  const auto expert = table_.remove(to_string(uid));
  if (!expert) return;
  runtime_.remove(expert);
  const std::lock_guard lock(disk_mutex_);
  if (auto saved = save_if_changed(expert); !saved) {
    spdlog::error("expert {} was unloaded without its last checkpoint: {}", to_string(uid), saved.error().message);
  }
  saved_.erase(uid);
}

Result<void> ExpertHost::checkpoint() {
  const std::lock_guard lock(disk_mutex_);
  if (!store_) return Error{Errc::kUnavailable, "there is no data directory to write checkpoints to", {}};
  Result<void> outcome;
  for (const auto& expert : table_.all()) {
    auto saved = save_if_changed(expert);
    if (!saved && outcome) outcome = saved;
  }
  return outcome;
}

Result<void> ExpertHost::save_if_changed(const std::shared_ptr<HostedExpert>& expert) {
  const auto& backend = *expert->backend;
  const auto last = saved_.find(backend.uid());
  if (!store_ || (last != saved_.end() && last->second == backend.updates())) return {};
  const auto snapshot = snapshot_of(expert);
  if (!snapshot) return Error{Errc::kInternal, "the device did not give expert " + backend.uid_text() + " free", {}};
  const auto started = std::chrono::steady_clock::now();
  auto saved = store_->save(*snapshot);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - started;
  metrics_.checkpoint(saved.has_value(), took.count());
  if (saved) saved_[backend.uid()] = snapshot->updates;
  return saved;
}

std::optional<ExpertSnapshot> ExpertHost::snapshot_of(const std::shared_ptr<HostedExpert>& expert) {
  const auto arrival = Arrival<std::optional<ExpertSnapshot>>::make();
  const bool accepted = runtime_.post([expert, arrival] {
    try {
      arrival->set(expert->backend->snapshot());
    } catch (const std::exception& e) {
      spdlog::error("no memory for a checkpoint of expert {}: {}", expert->backend->uid_text(), e.what());
      arrival->set(std::optional<ExpertSnapshot>{});
    }
  });
  if (!accepted) return expert->backend->snapshot();  // The device thread has ended: nobody else uses the expert.
  return arrival->wait(kSnapshotLimit).value_or(std::nullopt);
}

}  // namespace dmoe::expert_server
