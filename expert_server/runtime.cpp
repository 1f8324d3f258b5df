#include "expert_server/runtime.hpp"

#include "expert_server/batch_execution.hpp"
#include "expert_server/compute_threads.hpp"

#include <spdlog/spdlog.h>

#include <exception>

namespace dmoe::expert_server {
namespace {

/// What it takes to wake a sleeping thread and to be woken by its answer, on the machines at hand.
constexpr std::chrono::microseconds kThreadSwitch{10};

TaskPool& pool_of(HostedExpert& expert, Direction direction) {
  return expert.pools[direction == Direction::kForward ? 0 : 1];
}

Error stopping() { return {Errc::kUnavailable, "the server is shutting down: use another expert", {}}; }

Error gone(const ExpertBackend& backend) {
  return {Errc::kNotFound, "expert " + backend.uid_text() + " is not hosted here any more", {}};
}

void fail_dropped(std::vector<Task>& dropped, const ExpertBackend& backend) {
  for (auto& task : dropped) {
    const bool cancelled = task.reply->cancelled();
    task.reply->fail({cancelled ? Errc::kCancelled : Errc::kDeadlineExceeded,
                      "expert " + backend.uid_text() + " did not start the call in time",
                      {}});
  }
}

}  // namespace

struct Runtime::Batch {
  std::shared_ptr<HostedExpert> expert;
  Direction direction = Direction::kForward;
  std::vector<Task> tasks;
  std::vector<Task> dropped;
  std::function<void()> job;  ///< Instead of all above.
};

Runtime::Runtime(RuntimeOptions options) : options_(std::move(options)), thread_([this] { run(); }) {}

Runtime::~Runtime() { stop(std::chrono::milliseconds{0}); }

Result<void> Runtime::submit(const std::shared_ptr<HostedExpert>& expert, Direction direction, Task& task) {
  bool sleeping = false;
  {
    std::unique_lock lock(mutex_);
    if (draining_) return stopping();
    if (expert->removed) return gone(*expert->backend);
    auto& pool = pool_of(*expert, direction);
    const bool was_empty = pool.empty();
    const bool here = can_serve_here(*expert, pool, task.rows);
    if (auto pushed = pool.push(task); !pushed) return pushed;
    if (here) {
      serve_here(lock, expert, direction);
      return {};
    }
    if (was_empty) enqueue({expert, direction});
    sleeping = std::exchange(idle_, false);
  }
  if (sleeping) wake_.notify_one();
  return {};
}

bool Runtime::can_serve_here(const HostedExpert& expert, const TaskPool& pool, std::int64_t rows) const {
  return idle_ && !lent_ && waiting_.empty() && jobs_.empty() && pool.expected_time(rows) < kThreadSwitch &&
         !expert.backend->one_task_at_a_time();
}

void Runtime::serve_here(std::unique_lock<std::mutex>& lock, const std::shared_ptr<HostedExpert>& expert,
                         Direction direction) {
  Batch batch;
  batch.expert = expert;
  batch.direction = direction;
  batch.tasks = pool_of(*expert, direction).take_batch(std::chrono::steady_clock::now(), batch.dropped);
  serving_ = expert.get();
  lent_ = true;
  lock.unlock();
  serve_safely(batch);
  lock.lock();
  serving_ = nullptr;
  lent_ = false;
  served_.notify_all();
  if (!waiting_.empty() || !jobs_.empty() || stopped_) wake_.notify_one();
}

void Runtime::serve_safely(Batch& batch) {
  try {
    if (batch.job) {
      batch.job();
    } else {
      serve(batch);
    }
  } catch (const std::exception& e) {  // Out of memory, or a bug: this batch's calls fail, the device goes on.
    spdlog::error("a batch failed outside of its expert: {}", e.what());
  }
}

void Runtime::enqueue(const Waiting& waiting) {
  auto& pool = pool_of(*waiting.expert, waiting.direction);
  if (!pool.empty()) waiting_.emplace(PoolKey{pool.oldest(), &pool}, waiting);
}

bool Runtime::post(std::function<void()> job) {
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) return false;
    jobs_.push_back(std::move(job));
    idle_ = false;
  }
  wake_.notify_one();
  return true;
}

void Runtime::forget(const std::shared_ptr<HostedExpert>& expert, std::vector<Task>& tasks) {
  for (auto& pool : expert->pools) {
    if (pool.empty()) continue;
    waiting_.erase(PoolKey{pool.oldest(), &pool});
    for (auto& task : pool.take_all()) tasks.push_back(std::move(task));
  }
}

void Runtime::remove(const std::shared_ptr<HostedExpert>& expert) {
  std::vector<Task> tasks;
  {
    std::unique_lock lock(mutex_);
    expert->removed = true;
    forget(expert, tasks);
    served_.wait(lock, [&] { return serving_ != expert.get(); });
  }
  for (auto& task : tasks) task.reply->fail(gone(*expert->backend));
}

Runtime::Load Runtime::load() const {
  const std::lock_guard lock(mutex_);
  Load load;
  for (const auto& [key, waiting] : waiting_) {
    load.tasks += key.second->tasks();
    load.rows += key.second->rows();
  }
  return load;
}

bool Runtime::take_ready(Batch& batch, TimePoint now) {
  for (auto at = waiting_.begin(); at != waiting_.end(); ++at) {
    auto& pool = *at->first.second;
    if (!draining_ && pool.ready() > now) continue;
    const Waiting waiting = at->second;
    waiting_.erase(at);
    batch.expert = waiting.expert;
    batch.direction = waiting.direction;
    batch.tasks = pool.take_batch(now, batch.dropped);
    enqueue(waiting);
    serving_ = waiting.expert.get();
    return true;
  }
  return false;
}

bool Runtime::next(Batch& batch) {
  std::unique_lock lock(mutex_);
  serving_ = nullptr;
  served_.notify_all();
  for (;;) {
    if (lent_) {
      idle_ = true;
      wake_.wait(lock);
      idle_ = false;
      continue;
    }
    if (!jobs_.empty()) {  // Also when stopped: somebody waits for what was accepted.
      batch.job = std::move(jobs_.front());
      jobs_.pop_front();
      return true;
    }
    if (stopped_) return false;
    if (take_ready(batch, std::chrono::steady_clock::now())) return true;
    idle_ = true;
    if (waiting_.empty()) {
      wake_.wait(lock);
    } else {  // Only pools that wait for company; the oldest is ready first.
      wake_.wait_until(lock, waiting_.begin()->first.second->ready());
    }
    idle_ = false;
  }
}

void Runtime::serve(Batch& batch) {
  const auto& backend = *batch.expert->backend;
  if (!batch.dropped.empty()) {
    fail_dropped(batch.dropped, backend);
    if (options_.on_dropped) options_.on_dropped(batch.dropped.size());
  }
  if (batch.tasks.empty()) return;
  thread_local BatchMemory memory;
  const auto started = std::chrono::steady_clock::now();
  BatchReport report{.backend = &backend,
                     .direction = batch.direction,
                     .rows = 0,
                     .tasks = batch.tasks.size(),
                     .failed = 0,
                     .updates = backend.updates(),
                     .waited = started - batch.tasks.front().arrived,
                     .computed = {}};
  for (const auto& task : batch.tasks) report.rows += task.rows;
  report.failed = execute_batch(*batch.expert->backend, batch.direction, std::move(batch.tasks), memory);
  report.updates = backend.updates() - report.updates;
  report.computed = std::chrono::steady_clock::now() - started;
  {
    const std::lock_guard lock(mutex_);
    pool_of(*batch.expert, batch.direction).served(report.rows, report.computed);
  }
  if (options_.on_batch) options_.on_batch(report);
}

void Runtime::run() {
  use_compute_threads(effective_compute_threads(options_.compute_threads));
  for (;;) {
    Batch batch;
    if (!next(batch)) return;
    serve_safely(batch);
  }
}

void Runtime::stop(std::chrono::milliseconds grace) {
  const std::lock_guard stopping_once(stop_mutex_);
  if (!thread_.joinable()) return;
  std::vector<Task> left;
  std::vector<std::shared_ptr<HostedExpert>> keep;  // A task's failure may look at its expert.
  {
    std::unique_lock lock(mutex_);
    draining_ = true;
    idle_ = false;
    wake_.notify_all();
    served_.wait_for(lock, grace, [&] { return waiting_.empty() && serving_ == nullptr; });
    stopped_ = true;
    served_.wait(lock, [&] { return !lent_; });  // By its nature short.
    while (!waiting_.empty()) {
      const auto expert = waiting_.begin()->second.expert;
      keep.push_back(expert);
      forget(expert, left);
    }
    wake_.notify_all();
  }
  for (auto& task : left) task.reply->fail(stopping());
  thread_.join();
}

}  // namespace dmoe::expert_server
