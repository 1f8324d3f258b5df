#include "expert_server/expert_host.hpp"

#include "expert_server/arrival.hpp"
#include "expert_server/expert_factory.hpp"
#include "expert_server/tensor_memory.hpp"
#include "expert_server/unhurried.hpp"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <new>
#include <utility>

namespace dmoe::expert_server {
namespace {

/// Longer than any batch; it bounds a wait for a device that hangs.
constexpr std::chrono::minutes kSnapshotLimit{10};

/// Copied between two batches: under 1 ms, or a small part of what a batch of so large an expert takes.
std::size_t slice_of(const ExpertSnapshot& snapshot) {
  std::size_t bytes = 0;
  for (const auto& item : snapshot.parameters) bytes += item.tensor.nbytes();
  for (const auto& item : snapshot.optimizer_state) bytes += item.tensor.nbytes();
  return std::max<std::size_t>(4UL * 1024 * 1024, bytes / 64);
}

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

RuntimeOptions runtime_options(const ExpertHostOptions& options, ServerMetrics& metrics, ExpertResidency& residency) {
  return {.compute_threads = options.compute_threads,
          .grouped = options.grouped,
          .on_batch = [&metrics](const BatchReport& report) { metrics.batch(report); },
          .on_dropped = [&metrics](std::size_t tasks) { metrics.dropped(tasks); },
          .on_pause = &release_unused_tensor_memory,
          .on_absent = [&residency](const std::shared_ptr<HostedExpert>& expert) { residency.want(expert); }};
}

}  // namespace

ExpertHost::ExpertHost(ExpertHostOptions options, ServerMetrics& metrics)
    : options_(std::move(options)),
      metrics_(metrics),
      runtimes_(options_.devices, runtime_options(options_, metrics, residency_)) {
  if (options_.checkpoints) {
    store_.emplace(*options_.checkpoints, options_.keep_checkpoints, options_.max_disk);
  }
}

ExpertHost::~ExpertHost() { stop(std::chrono::milliseconds{0}); }

std::vector<ExpertUid> ExpertHost::stored() {
  const std::lock_guard lock(disk_mutex_);
  return store_ ? store_->stored() : std::vector<ExpertUid>{};
}

Result<void> ExpertHost::load(const ExpertUid& uid) {
  const std::lock_guard lock(disk_mutex_);
  if (auto room = make_room(); !room) return room;
  bool restored = false;
  auto backend = make_expert(uid, options_.expert, store_ ? &*store_ : nullptr, options_.reset_optimizer, options_.seed,
                             &restored);
  if (!backend) return backend.error();
  if (restored) saved_[uid] = (*backend)->updates();
  auto pool = options_.pool;
  pool.one_task_at_a_time = (*backend)->one_task_at_a_time();
  auto expert = std::make_shared<HostedExpert>(std::move(*backend), pool);
  if (auto placed = place(*expert); !placed) return placed;
  expert->meters = &metrics_.expert(expert->backend->uid_text());
  expert->last_used = std::chrono::steady_clock::now();
  table_.add(std::move(expert));
  if (options_.max_resident > 0) {
    residency_.start([this](const std::shared_ptr<HostedExpert>& wanted) { revive(wanted); });
  }
  return {};
}

Result<void> ExpertHost::place(HostedExpert& expert) {
  try {
    runtimes_.place(expert);
    return {};
  } catch (const std::exception& e) {  // A device without memory for it, or one that broke.
    runtimes_.forget(expert);
    return Error{Errc::kUnavailable,
                 "expert " + expert.backend->uid_text() + " cannot be moved to " +
                     runtimes_.device(expert.runtime).str() + ": " + e.what(),
                 {}};
  }
}

void ExpertHost::unload(const ExpertUid& uid) {
  const auto expert = table_.remove(to_string(uid));
  if (!expert) return;
  runtimes_.of(*expert).remove(expert);
  runtimes_.forget(*expert);
  const std::lock_guard lock(disk_mutex_);
  if (auto saved = save_if_changed(expert); !saved) {
    spdlog::error("expert {} was unloaded without its last checkpoint: {}", to_string(uid), saved.error().message);
  }
  saved_.erase(uid);
}

Result<void> ExpertHost::checkpoint() {
  if (!options_.checkpoints) {
    return Error{Errc::kUnavailable, "there is no data directory to write checkpoints to", {}};
  }
  Result<void> outcome;
  for (const auto& expert : table_.all()) {
    const std::lock_guard lock(disk_mutex_);  // One at a time: an evicted expert that is called need not wait for all.
    if (table_.find(expert->backend->uid_text()) != expert) continue;
    auto saved = save_if_changed(expert);
    if (!saved && outcome) outcome = saved;
  }
  return outcome;
}

Result<void> ExpertHost::save_if_changed(const std::shared_ptr<HostedExpert>& expert) {
  const auto& backend = *expert->backend;
  if (backend.evicted()) return {};  // It was written before.
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

void ExpertHost::stop(std::chrono::milliseconds grace) {
  runtimes_.stop(grace);
  residency_.stop();
}

/// @pre disk_mutex_ is held, as by all that changes where an expert is.
Result<void> ExpertHost::make_room() {
  if (options_.max_resident == 0) return {};
  auto experts = table_.all();
  std::erase_if(experts, [](const auto& expert) { return expert->backend->evicted(); });
  if (experts.size() < options_.max_resident) return {};
  std::map<const HostedExpert*, TimePoint> used;  // Read once: it moves while it is sorted by.
  for (const auto& expert : experts) used[expert.get()] = runtimes_.of(*expert).last_used(*expert);
  std::sort(experts.begin(), experts.end(),
            [&](const auto& left, const auto& right) { return used[left.get()] < used[right.get()]; });
  const auto excess = experts.size() + 1 - options_.max_resident;
  for (std::size_t i = 0; i < excess; ++i) {
    const auto evicted = evict(experts[i]);
    metrics_.evicted(evicted.has_value());
    if (!evicted) return evicted;
  }
  return {};
}

Result<void> ExpertHost::evict(const std::shared_ptr<HostedExpert>& expert) {
  // The bulk is written while it is still served; what it learns meanwhile is written when it is not.
  if (auto saved = save_if_changed(expert); !saved) return saved;
  if (!runtimes_.of(*expert).suspend(expert)) return Error{Errc::kUnavailable, "the server is shutting down", {}};
  if (auto saved = save_if_changed(expert); !saved) {
    runtimes_.of(*expert).resume(expert);
    return saved;
  }
  expert->backend->evict();
  if (runtimes_.of(*expert).waits(*expert)) residency_.want(expert);  // Its turn comes again.
  return {};
}

/// On the residency's thread: brings an expert back that was called.
void ExpertHost::revive(const std::shared_ptr<HostedExpert>& expert) {
  const std::lock_guard lock(disk_mutex_);
  if (!expert->backend->evicted() || table_.find(expert->backend->uid_text()) != expert) return;
  const auto started = std::chrono::steady_clock::now();
  const auto revived = [&]() -> Result<void> {
    if (auto room = make_room(); !room) return room;
    auto snapshot = store_->load(expert->backend->uid());
    if (!snapshot) return snapshot.error();
    if (!*snapshot) return Error{Errc::kUnavailable, "its checkpoint is gone", {}};
    return expert->backend->revive(std::move(**snapshot));
  }();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - started;
  metrics_.revived(revived.has_value(), took.count());
  if (revived) return runtimes_.of(*expert).resume(expert);
  spdlog::error("expert {} cannot be brought back from disk: {}", expert->backend->uid_text(), revived.error().message);
  runtimes_.of(*expert).fail_waiting(expert, {Errc::kUnavailable,
                                              "expert " + expert->backend->uid_text() +
                                                  " cannot be brought back from disk: " + revived.error().message,
                                              {}});
}

/// Null: no memory for it, or a device that hangs.
std::shared_ptr<const ExpertSnapshot> ExpertHost::snapshot_of(const std::shared_ptr<HostedExpert>& expert) {
  auto& backend = *expert->backend;
  auto& runtime = runtimes_.of(*expert);
  try {
    const auto reserved = between_batches<std::shared_ptr<const ExpertSnapshot>>(
        runtime, [&backend]() { return backend.reserve_snapshot(); });
    if (!reserved || !*reserved) return nullptr;
    // Before the copy begins: a backward meanwhile need not wait for a page of it.
    run_unhurried([&] {
      populate((*reserved)->parameters);
      populate((*reserved)->optimizer_state);
    });
    const auto begun = between_batches<bool>(runtime, [&backend] {
      backend.begin_snapshot();
      return true;
    });
    if (!begun) return nullptr;
    const auto slice = slice_of(**reserved);
    for (;;) {
      const auto done = between_batches<bool>(runtime, [&backend, slice] { return backend.copy_snapshot(slice); });
      if (!done) return nullptr;
      if (*done) return *reserved;
    }
  } catch (const std::bad_alloc&) {  // The device thread has ended, and this one was asked.
    spdlog::error("no memory for a checkpoint of expert {}", backend.uid_text());
    return nullptr;
  }
}

}  // namespace dmoe::expert_server
