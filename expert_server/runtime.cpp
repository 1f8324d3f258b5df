#include "expert_server/runtime.hpp"

#include "expert_server/batch_execution.hpp"
#include "expert_server/compute_threads.hpp"
#include "expert_server/few_rows.hpp"
#include "expert_server/parallel_range.hpp"

#include <c10/core/DeviceGuard.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <iterator>
#include <string>
#include <utility>

namespace dmoe::expert_server {
namespace {

/// What it takes to wake a sleeping thread and to be woken by its answer, on the machines at hand.
constexpr std::chrono::microseconds kThreadSwitch{10};

/// A batch of fewer rows does not keep several compute threads busy: they wait for the weights, or for each other.
constexpr std::int64_t kSmallBatch = 16;
constexpr std::size_t kMaxGroup = 64;  ///< Batches computed at once; bounds how long a newcomer waits.
constexpr std::chrono::milliseconds kShortestAdvice{10};  ///< When to come back.
constexpr std::chrono::milliseconds kLongestAdvice{5'000};
constexpr std::chrono::seconds kBetweenPauses{5};
constexpr double kSaturated = 0.8;       ///< Callers wait for a device that computes for more of the time, …
constexpr double kStillSaturated = 0.5;  ///< … until it does for less than this.
constexpr int kPausesAfterBatch = 2;     ///< What the last batch used is old in the second one.
constexpr std::size_t kMaxLooked = 256;  ///< Pools looked at to fill a group.

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

/// The batch of one expert.
struct Runtime::Part {
  std::shared_ptr<HostedExpert> expert;
  Direction direction = Direction::kForward;
  std::vector<Task> tasks;
  std::vector<Task> dropped;
  BatchReport report;
};

struct Runtime::Batch {
  std::vector<Part> parts;    ///< Of different experts.
  std::function<void()> job;  ///< Instead of parts.
};

Runtime::Runtime(RuntimeOptions options)
    : options_(std::move(options)),
      most_threads_(effective_compute_threads(options_.compute_threads)),
      governor_(options_.compute_threads),
      threads_(threads_now()),
      thread_([this] { run(); }) {}

/// How many compute threads the next batch gets.
int Runtime::threads_now() {
  if (options_.compute_threads > 0) return options_.compute_threads;
  if (!options_.device.is_cpu()) return 1;
  // The load of our own callers, who work when we do not, looks like that of a stranger: a device that is never idle
  // takes the core that they leave now and then.
  const int fitting = governor_.threads();
  added_ = busy_ > (added_ ? kStillSaturated : kSaturated) && governor_.room_for_another();
  const int all = std::min(fitting + (added_ ? 1 : 0), most_threads_);
  return trials_.threads(std::max(1, all / std::max(1, options_.sharers)));
}

Runtime::~Runtime() { stop(std::chrono::milliseconds{0}); }

Result<void> Runtime::submit(const std::shared_ptr<HostedExpert>& expert, Direction direction, Task& task) {
  bool sleeping = false;
  bool absent = false;
  {
    std::unique_lock lock(mutex_);
    if (draining_) return stopping();
    if (expert->removed) return gone(*expert->backend);
    auto& pool = pool_of(*expert, direction);
    const bool was_empty = pool.empty();
    const bool here = can_serve_here(*expert, pool, task.rows);
    if (auto hopeless = cannot_be_in_time(task)) return std::move(*hopeless);
    if (auto pushed = pool.push(task); !pushed) return pushed;
    expert->last_used = std::chrono::steady_clock::now();
    if (here) {
      serve_here(lock, expert, direction);
      return {};
    }
    absent = !expert->resident;
    if (was_empty) enqueue({expert, direction});
    sleeping = !absent && std::exchange(idle_, false);
  }
  if (absent && options_.on_absent) options_.on_absent(expert);
  if (sleeping) wake_.notify_one();
  return {};
}

/// Tasks are served by age, so a newcomer will wait about as long as the oldest has: if its caller will have left by
/// then, it is told now, while it can still go elsewhere. This is where a server that is full stops taking calls, at
/// whatever rate and with however many experts that is.
std::optional<Error> Runtime::cannot_be_in_time(const Task& task) const {
  if (waiting_.empty()) return std::nullopt;
  const auto now = std::chrono::steady_clock::now();
  const auto overdue = now - waiting_.begin()->first.second->ready();
  if (task.deadline - now > overdue) return std::nullopt;
  const auto wait = std::chrono::duration_cast<std::chrono::milliseconds>(overdue);
  return Error{Errc::kOverloaded,
               "the oldest call waits for " + std::to_string(wait.count()) +
                   " ms already, this one could not be answered in time",
               std::clamp(wait, kShortestAdvice, kLongestAdvice)};
}

bool Runtime::can_serve_here(const HostedExpert& expert, const TaskPool& pool, std::int64_t rows) const {
  return idle_ && !lent_ && expert.resident && waiting_.empty() && jobs_.empty() &&
         pool.expected_time(rows) < kThreadSwitch && !expert.backend->one_task_at_a_time();
}

void Runtime::serve_here(std::unique_lock<std::mutex>& lock, const std::shared_ptr<HostedExpert>& expert,
                         Direction direction) {
  Batch batch;
  auto& part = batch.parts.emplace_back();
  part.expert = expert;
  part.direction = direction;
  part.tasks = pool_of(*expert, direction).take_batch(std::chrono::steady_clock::now(), part.dropped);
  serving_ = {expert.get()};
  expert->served = true;
  lent_ = true;
  lock.unlock();
  serve_safely(batch);
  lock.lock();
  serving_.clear();
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
  if (pool.empty()) return;
  if (waiting.expert->resident) {
    waiting_.emplace(PoolKey{pool.oldest(), &pool}, waiting);
  } else {
    absent_.insert(waiting.expert);
  }
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
  absent_.erase(expert);
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
    served_.notify_all();
    forget(expert, tasks);
    served_.wait(lock, [&] { return !is_serving(expert.get()); });
  }
  for (auto& task : tasks) task.reply->fail(gone(*expert->backend));
}

bool Runtime::suspend(const std::shared_ptr<HostedExpert>& expert) {
  std::unique_lock lock(mutex_);
  const auto busy = [&] { return !expert->pools[0].empty() || !expert->pools[1].empty(); };
  served_.wait(
      lock, [&] { return draining_ || expert->removed || (!is_serving(expert.get()) && (expert->served || !busy())); });
  if (draining_ || expert->removed || !expert->resident) return false;
  for (auto& pool : expert->pools) {
    if (!pool.empty()) waiting_.erase(PoolKey{pool.oldest(), &pool});
  }
  expert->resident = false;
  if (busy()) absent_.insert(expert);
  return true;
}

void Runtime::resume(const std::shared_ptr<HostedExpert>& expert) {
  {
    const std::lock_guard lock(mutex_);
    expert->resident = true;
    expert->served = false;
    expert->last_used = std::chrono::steady_clock::now();
    absent_.erase(expert);
    enqueue({expert, Direction::kForward});
    enqueue({expert, Direction::kBackward});
    idle_ = false;
  }
  wake_.notify_one();
}

bool Runtime::is_resident(const HostedExpert& expert) const {
  const std::lock_guard lock(mutex_);
  return expert.resident;
}

bool Runtime::waits(HostedExpert& expert) const {
  const std::lock_guard lock(mutex_);
  return !expert.pools[0].empty() || !expert.pools[1].empty();
}

TimePoint Runtime::last_used(const HostedExpert& expert) const {
  const std::lock_guard lock(mutex_);
  return expert.last_used;
}

void Runtime::fail_waiting(const std::shared_ptr<HostedExpert>& expert, const Error& error) {
  std::vector<Task> tasks;
  {
    const std::lock_guard lock(mutex_);
    forget(expert, tasks);
  }
  for (auto& task : tasks) task.reply->fail(error);
}

Runtime::Load Runtime::load(const HostedExpert& expert, Direction direction) const {
  const std::lock_guard lock(mutex_);
  const auto& pool = expert.pools[direction == Direction::kForward ? 0 : 1];
  return {pool.tasks(), pool.rows()};
}

Runtime::Load Runtime::load() const {
  const std::lock_guard lock(mutex_);
  Load load;
  for (const auto& expert : absent_) {
    for (const auto& pool : expert->pools) {
      load.tasks += pool.tasks();
      load.rows += pool.rows();
    }
  }
  for (const auto& [key, waiting] : waiting_) {
    load.tasks += key.second->tasks();
    load.rows += key.second->rows();
  }
  return load;
}

bool Runtime::is_serving(const HostedExpert* expert) const {
  return std::find(serving_.begin(), serving_.end(), expert) != serving_.end();
}

/// Whether a pool that is ready may be served with what the batch holds already.
bool Runtime::joins(const Batch& batch, const Waiting& waiting) const {
  if (batch.parts.empty()) return true;
  return !is_serving(waiting.expert.get()) && waiting.expert->backend->runs_beside_others() &&
         pool_of(*waiting.expert, waiting.direction).rows() <= kSmallBatch;
}

bool Runtime::take_ready(Batch& batch, TimePoint now) {
  std::size_t most = 1;
  std::size_t looked = 0;
  for (auto at = waiting_.begin(); at != waiting_.end() && batch.parts.size() < most && looked < kMaxLooked; ++looked) {
    auto& pool = *at->first.second;
    if ((!draining_ && pool.ready() > now) || !joins(batch, at->second)) {
      ++at;
      continue;
    }
    const bool alone = !options_.grouped || threads_ < 2 || !options_.device.is_cpu() || pool.rows() > kSmallBatch ||
                       !at->second.expert->backend->runs_beside_others();
    if (!alone) most = kMaxGroup;
    auto& part = batch.parts.emplace_back();
    part.expert = at->second.expert;
    part.direction = at->second.direction;
    part.tasks = pool.take_batch(now, part.dropped);
    serving_.push_back(part.expert.get());
    part.expert->served = true;
    at = waiting_.erase(at);
  }
  for (const auto& part : batch.parts) enqueue({part.expert, part.direction});
  return !batch.parts.empty();
}

bool Runtime::next(Batch& batch) {
  std::unique_lock lock(mutex_);
  serving_.clear();
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
    if (pause_due()) {
      lock.unlock();
      options_.on_pause();
      lock.lock();
      continue;
    }
    if (take_ready(batch, std::chrono::steady_clock::now())) {
      pauses_ = options_.on_pause ? kPausesAfterBatch : 0;
      return true;
    }
    idle_ = true;
    if (waiting_.empty() && pauses_ > 0) {
      wake_.wait_until(lock, last_pause_ + kBetweenPauses);
    } else if (waiting_.empty()) {
      wake_.wait(lock);
    } else {  // Only pools that wait for company; the oldest is ready first.
      wake_.wait_until(lock, waiting_.begin()->first.second->ready());
    }
    idle_ = false;
  }
}

bool Runtime::pause_due() noexcept {
  const auto now = std::chrono::steady_clock::now();
  if (pauses_ == 0 || now < last_pause_ + kBetweenPauses) return false;
  --pauses_;
  last_pause_ = now;
  return true;
}

void Runtime::note_staleness(Part& part, const Task& task, std::uint64_t updates) {
  auto& staleness = part.expert->staleness;
  if (part.direction == Direction::kForward) return staleness.forward(task.rng_seed, updates);
  if (const auto passed = staleness.backward(task.rng_seed, updates)) {
    part.report.staleness += *passed;
    ++part.report.staleness_calls;
  }
}

/// Answers the tasks of one part. May be called for several parts at once.
void Runtime::compute(Part& part) const {
  if (part.tasks.empty()) return;
  thread_local BatchMemory memory;
  const FewRowsMode few_rows_mode(options_.grouped);
  auto& backend = *part.expert->backend;
  const auto started = std::chrono::steady_clock::now();
  auto& report = part.report;
  report.waited = started - part.tasks.front().arrived;
  report.tasks = part.tasks.size();
  const auto updates = backend.updates();
  for (const auto& task : part.tasks) {
    report.rows += task.rows;
    report.waited_in_total += started - task.arrived;
    note_staleness(part, task, updates);
  }
  for (const auto& task : part.tasks) task.reply->started(started, report.tasks, report.rows);
  report.failed = execute_batch(backend, part.direction, std::move(part.tasks), memory);
  report.updates = backend.updates() - updates;
  report.computed = std::chrono::steady_clock::now() - started;
}

/// Each part on one compute thread, as many at once as there are threads.
void Runtime::compute_together(std::vector<Part>& parts) const {
  const OneBlasThread one_blas_thread(threads_);
  std::atomic<std::size_t> next{0};
  parallel_range(threads_, 1, [&](std::int64_t begin, std::int64_t end) {
    for (auto share = begin; share < end; ++share) {
      for (std::size_t i = next++; i < parts.size(); i = next++) {
        try {
          compute(parts[i]);
        } catch (const std::exception& e) {
          spdlog::error("a batch of expert {} failed outside of it: {}", parts[i].expert->backend->uid_text(),
                        e.what());
        }
      }
    }
  });
}

void Runtime::serve(Batch& batch) {
  for (auto& part : batch.parts) {
    part.report.expert = part.expert.get();
    part.report.backend = part.expert->backend.get();
    part.report.direction = part.direction;
    if (part.dropped.empty()) continue;
    fail_dropped(part.dropped, *part.expert->backend);
    if (options_.on_dropped) options_.on_dropped(part.dropped.size());
  }
  const auto started = std::chrono::steady_clock::now();
  if (batch.parts.size() > 1 && batch.parts.size() >= static_cast<std::size_t>(threads_)) {
    compute_together(batch.parts);
  } else {
    for (auto& part : batch.parts) compute(part);
  }
  note_times(batch, std::chrono::steady_clock::now() - started);
  if (!options_.on_batch) return;
  for (const auto& part : batch.parts) {
    if (part.report.tasks > 0) options_.on_batch(part.report);
  }
}

/// What the next batches may be expected to take, and whether this one's threads were well chosen.
void Runtime::note_times(const Batch& batch, std::chrono::nanoseconds took) {
  double usual = 0;
  bool known = true;
  {
    const std::lock_guard lock(mutex_);
    known = !lent_;  // Not by a caller's thread.
    for (const auto& part : batch.parts) {
      if (part.report.rows == 0) continue;
      auto& pool = pool_of(*part.expert, part.direction);
      const double seconds = pool.usual_seconds(part.report.rows);
      known = known && seconds > 0;
      usual += seconds;
      pool.served(part.report.rows, part.report.computed);
    }
  }
  if (known && usual > 0) trials_.served(std::chrono::duration<double>(took).count() / usual);
}

void Runtime::note_busy(std::chrono::duration<double> time, bool busy) noexcept {
  busy_ += ((busy ? 1.0 : 0.0) - busy_) * (1 - std::exp(-time.count()));
}

void Runtime::run() {
  c10::OptionalDeviceGuard current;  // Memory for copies belongs to the device that is current.
  if (!options_.device.is_cpu()) current.reset_device(options_.device);
  use_compute_threads(threads_);
  auto since = std::chrono::steady_clock::now();
  const auto lap = [&since] {
    const auto now = std::chrono::steady_clock::now();
    return now - std::exchange(since, now);
  };
  for (;;) {
    Batch batch;
    if (!next(batch)) return;
    note_busy(lap(), false);
    if (const auto threads = threads_now(); threads != threads_) {
      threads_ = threads;
      use_compute_threads(threads_);
    }
    serve_safely(batch);
    note_busy(lap(), true);
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
    served_.notify_all();
    served_.wait_for(lock, grace, [&] { return waiting_.empty() && serving_.empty(); });
    stopped_ = true;
    served_.wait(lock, [&] { return !lent_; });  // By its nature short.
    while (!waiting_.empty() || !absent_.empty()) {
      const auto expert = waiting_.empty() ? *absent_.begin() : waiting_.begin()->second.expert;
      keep.push_back(expert);
      forget(expert, left);
    }
    wake_.notify_all();
  }
  for (auto& task : left) task.reply->fail(stopping());
  thread_.join();
}

}  // namespace dmoe::expert_server
