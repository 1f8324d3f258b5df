// The thread that owns a device: it decides which pools are served next, and computes.
#pragma once

#include "expert_server/compute_threads.hpp"
#include "expert_server/expert_backend.hpp"
#include "expert_server/staleness.hpp"
#include "expert_server/task_pool.hpp"
#include "expert_server/thread_trials.hpp"

#include <array>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

namespace dmoe::expert_server {

class ExpertMeters;
struct HostedExpert;

/// What became of one batch. For metrics.
struct BatchReport {
  const HostedExpert* expert = nullptr;
  const ExpertBackend* backend = nullptr;
  Direction direction = Direction::kForward;
  std::int64_t rows = 0;
  std::size_t tasks = 0;
  std::size_t failed = 0;
  std::uint64_t updates = 0;                    ///< Optimizer steps.
  std::chrono::nanoseconds waited{0};           ///< The oldest task's time in the pool.
  std::chrono::nanoseconds waited_in_total{0};  ///< Of all tasks.
  std::chrono::nanoseconds computed{0};
  std::uint64_t staleness = 0;        ///< Updates between forward and backward, summed over `staleness_calls`.
  std::uint64_t staleness_calls = 0;  ///< Backward tasks whose forward pass is remembered.
};

struct RuntimeOptions {
  /// Intra-op threads of the device thread; 0: as many as others leave (ThreadGovernor), corrected by ThreadTrials.
  int compute_threads = 0;
  /// Small batches of several experts are computed at once, each on one compute thread, and products of few rows read
  /// their weights once (few_rows.hpp). Off: one batch after another, all through the BLAS.
  bool grouped = true;
  /// Called on the device thread after each batch, and for tasks that were dropped before it. May be empty.
  std::function<void(const BatchReport&)> on_batch;
  std::function<void(std::size_t tasks)> on_dropped;
  /// Called on the device thread every 5 s or so, between two batches or when there is none. May be empty.
  std::function<void()> on_pause = {};
  /// Called by whoever submits a task for an expert that is not resident. May be empty.
  std::function<void(const std::shared_ptr<HostedExpert>&)> on_absent = {};
  c10::Device device = c10::kCPU;  ///< What its experts are placed on.
  /// Runtimes of this process that compute on the CPU: they divide the threads that others leave.
  int sharers = 1;
};

/// An expert and its two queues. Held by the runtime and by whoever submits to it.
struct HostedExpert {
  HostedExpert(std::unique_ptr<ExpertBackend> backend, const TaskPoolOptions& pool_options)
      : backend(std::move(backend)), pools{TaskPool(pool_options), TaskPool(pool_options)} {}

  const std::unique_ptr<ExpertBackend> backend;  ///< Computed with on the device thread only.
  std::size_t runtime = 0;                       ///< Of Runtimes: which one serves it. Set before it is served.
  std::array<TaskPool, 2> pools;                 ///< By Direction. Guarded by the runtime's mutex.
  ExpertMeters* meters = nullptr;                ///< May be null; outlives this.
  Staleness staleness;                           ///< Of whoever computes.
  bool removed = false;                          ///< Guarded by the runtime's mutex.
  bool resident = true;  ///< Guarded by the runtime's mutex. False: its tasks wait until Runtime::resume.
  bool served = false;   ///< Guarded by the runtime's mutex: since it was made, or resumed.
  TimePoint last_used;   ///< Guarded by the runtime's mutex.
};

/// Serves the pool whose oldest task waits longest, with as many rows as fit one batch. When that batch is small, those
/// of other experts that are small too are served with it, so that no compute thread is idle. Thread-safe.
class Runtime {
 public:
  explicit Runtime(RuntimeOptions options);
  ~Runtime();  ///< As stop() without grace.
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  /// Queues a task, or, when the device is idle and the expert has shown to need less time than waking its thread
  /// would, computes it at once on the calling thread (never while the device thread computes). On an error its reply
  /// has not been called: kInvalidArgument (too many rows), kOverloaded (its pool is full, or calls wait so long
  /// already that it would not be served before its deadline), kUnavailable (stopping), kNotFound (the expert was
  /// removed).
  Result<void> submit(const std::shared_ptr<HostedExpert>& expert, Direction direction, Task& task);

  /// Runs `job` on the device thread between two batches, before any further one. False: stopped, it will not run.
  bool post(std::function<void()> job);

  /// Fails what waits for the expert with kNotFound and forgets it; returns when the device does not use it any more.
  void remove(const std::shared_ptr<HostedExpert>& expert);

  /// Takes an expert out of service, so that it may be evicted: its tasks wait from now on. Waits until it is idle, or
  /// was served at least once since it was resumed: experts that take turns all get one. False: it was removed or
  /// suspended already, or the runtime stops. Its tasks that wait already are for `waits`.
  bool suspend(const std::shared_ptr<HostedExpert>& expert);
  void resume(const std::shared_ptr<HostedExpert>& expert);
  bool is_resident(const HostedExpert& expert) const;
  bool waits(HostedExpert& expert) const;  ///< Whether tasks are queued for it.
  TimePoint last_used(const HostedExpert& expert) const;
  /// Answers all tasks that wait for an expert with `error`.
  void fail_waiting(const std::shared_ptr<HostedExpert>& expert, const Error& error);

  struct Load {
    std::size_t tasks = 0;
    std::int64_t rows = 0;
  };
  Load load() const;
  Load load(const HostedExpert& expert, Direction direction) const;

  /// Refuses new tasks, serves what is queued for at most `grace`, fails the rest with kUnavailable, ends the thread.
  void stop(std::chrono::milliseconds grace);

 private:
  using PoolKey = std::pair<TimePoint, TaskPool*>;  ///< Ordered by the oldest task's arrival.
  struct Waiting {
    std::shared_ptr<HostedExpert> expert;
    Direction direction;
  };
  struct Part;
  struct Batch;

  int threads_now();
  void note_busy(std::chrono::duration<double> time, bool busy) noexcept;
  std::optional<Error> cannot_be_in_time(const Task& task) const;
  bool can_serve_here(const HostedExpert& expert, const TaskPool& pool, std::int64_t rows) const;
  void serve_here(std::unique_lock<std::mutex>& lock, const std::shared_ptr<HostedExpert>& expert, Direction direction);
  void run();
  bool next(Batch& batch);
  bool pause_due() noexcept;
  bool take_ready(Batch& batch, TimePoint now);
  bool joins(const Batch& batch, const Waiting& waiting) const;
  bool is_serving(const HostedExpert* expert) const;
  void serve(Batch& batch);
  void note_times(const Batch& batch, std::chrono::nanoseconds took);
  void compute(Part& part) const;
  static void note_staleness(Part& part, const Task& task, std::uint64_t updates);
  void compute_together(std::vector<Part>& parts) const;
  void serve_safely(Batch& batch);
  void enqueue(const Waiting& waiting);
  void forget(const std::shared_ptr<HostedExpert>& expert, std::vector<Task>& tasks);

  const RuntimeOptions options_;
  const int most_threads_;   ///< What the machine has for all runtimes.
  ThreadGovernor governor_;  ///< Of the device thread, as are the next four.
  ThreadTrials trials_;
  int threads_;
  double busy_ = 0;     ///< Share of the last second in which the device thread computed.
  bool added_ = false;  ///< A thread to what others leave: callers wait for this device.
  TimePoint last_pause_ = std::chrono::steady_clock::now();  ///< Of the device thread, as is the next.
  int pauses_ = 0;                                           ///< Until nothing is left to do in one.
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::map<PoolKey, Waiting> waiting_;              // Guarded by mutex_, as are all below.
  std::set<std::shared_ptr<HostedExpert>> absent_;  ///< Not resident, with tasks that wait.
  std::deque<std::function<void()>> jobs_;
  std::vector<const HostedExpert*> serving_;
  std::condition_variable served_;  ///< A batch or a job ended.
  bool idle_ = false;               ///< The thread sleeps: a submit must wake it.
  bool lent_ = false;               ///< A submitting thread computes; the device thread waits for it.
  bool draining_ = false;           ///< No new tasks.
  bool stopped_ = false;
  std::mutex stop_mutex_;  ///< Makes stop() idempotent across threads.
  std::thread thread_;
};

}  // namespace dmoe::expert_server
