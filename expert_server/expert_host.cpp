#include "expert_server/expert_host.hpp"

#include "expert_server/arrival.hpp"
#include "expert_server/expert_factory.hpp"
#include "expert_server/unhurried.hpp"

#include <spdlog/spdlog.h>

#include <chrono>
#include <functional>
#include <new>
#include <utility>

namespace dmoe::expert_server {
namespace {

/// Longer than any batch; it bounds a wait for a device that hangs.
constexpr std::chrono::minutes kSnapshotLimit{10};

constexpr std::size_t kSnapshotSlice = 4UL * 1024 * 1024;  ///< Copied between two batches: under 1 ms.

/// What `work` returns on the device thread, or here when that has ended: nobody else uses the experts then. Nothing:
/// the device hangs, or `work` threw for lack of memory.
template <class T>
std::optional<T> between_batches(Runtime& runtime, std::function<T()> work) {
  const auto arrival = Arrival<std::optional<T>>::make();
  const bool accepted = runtime.post([arrival, work] {
    try {
      arrival->set(std::optional<T>(work()));
    } catch (const std::exception& e) {
      spdlog::error("a checkpoint cannot be taken: {}", e.what());
      arrival->set(std::optional<T>{});
    }
  });
  if (!accepted) return work();
  return arrival->wait(kSnapshotLimit).value_or(std::nullopt);
}

RuntimeOptions runtime_options(const ExpertHostOptions& options, ServerMetrics& metrics) {
  return {.compute_threads = options.compute_threads,
          .grouped = options.grouped,
          .on_batch = [&metrics](const BatchReport& report) { metrics.batch(report); },
          .on_dropped = [&metrics](std::size_t tasks) { metrics.dropped(tasks); }};
}

}  // namespace

ExpertHost::ExpertHost(ExpertHostOptions options, ServerMetrics& metrics)
    : options_(std::move(options)), metrics_(metrics), runtime_(runtime_options(options_, metrics)) {
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
  Result<void> saved;
  run_unhurried([&] { saved = store_->save(*snapshot); });
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - started;
  metrics_.checkpoint(saved.has_value(), took.count());
  if (saved) saved_[backend.uid()] = snapshot->updates;
  return saved;
}

/// Null: no memory for it, or a device that hangs.
std::shared_ptr<const ExpertSnapshot> ExpertHost::snapshot_of(const std::shared_ptr<HostedExpert>& expert) {
  auto& backend = *expert->backend;
  try {
    const auto begun = between_batches<std::shared_ptr<const ExpertSnapshot>>(
        runtime_, [&backend]() { return backend.begin_snapshot(); });
    if (!begun || !*begun) return nullptr;
    populate((*begun)->parameters);
    populate((*begun)->optimizer_state);
    for (;;) {
      const auto done = between_batches<bool>(runtime_, [&backend] { return backend.copy_snapshot(kSnapshotSlice); });
      if (!done) return nullptr;
      if (*done) return *begun;
    }
  } catch (const std::bad_alloc&) {  // The device thread has ended, and this one was asked.
    spdlog::error("no memory for a checkpoint of expert {}", backend.uid_text());
    return nullptr;
  }
}

}  // namespace dmoe::expert_server
