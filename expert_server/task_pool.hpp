// The queue of one expert in one direction.
#pragma once

#include "expert_server/task.hpp"

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

namespace dmoe::expert_server {

struct TaskPoolOptions {
  std::int64_t max_batch_rows = 4'096;  ///< Rows (dimension 0) of one batch; a larger task is refused.
  std::size_t max_queued_batches = 4;   ///< Times max_batch_rows: queued rows beyond it are refused.
  std::size_t max_queued_tasks = 1'024;
  std::chrono::milliseconds batch_timeout{0};  ///< The oldest task waits at most this long for company.
  bool one_task_at_a_time = false;             ///< See ExpertModule.
};

/// First in, first out, except that a batch holds only tasks whose tensors can be concatenated: tasks of other shapes
/// wait for the next one. Not thread-safe: the runtime guards all of its pools with one mutex.
class TaskPool {
 public:
  explicit TaskPool(TaskPoolOptions options) : options_(options) {}

  /// kInvalidArgument: more rows than a batch may have; kOverloaded: the queue is full. `task` is then untouched.
  Result<void> push(Task& task);

  /// Takes the oldest task and all that fit with it. Tasks that expired or were cancelled go to `dropped`, and are not
  /// part of the batch, which may be empty then.
  std::vector<Task> take_batch(TimePoint now, std::vector<Task>& dropped);
  /// Empties the queue.
  std::vector<Task> take_all();

  bool empty() const noexcept { return queue_.empty(); }
  std::size_t tasks() const noexcept { return queue_.size(); }
  std::int64_t rows() const noexcept { return rows_; }
  TimePoint oldest() const noexcept { return queue_.front().arrived; }  ///< @pre !empty()
  /// When the oldest task need not wait for company any more. @pre !empty()
  TimePoint ready() const noexcept;

  /// How long `rows` rows should take, from the last few batches; hours when there is none.
  std::chrono::nanoseconds expected_time(std::int64_t rows) const noexcept;
  /// How long they have taken over the last hundred batches or so, in seconds; 0 when there was none.
  double usual_seconds(std::int64_t rows) const noexcept { return usual_seconds_per_row_ * static_cast<double>(rows); }

  /// Remembers how long `rows` rows took.
  void served(std::int64_t rows, std::chrono::nanoseconds time) noexcept;

 private:
  std::chrono::milliseconds retry_after() const noexcept;

  TaskPoolOptions options_;
  std::deque<Task> queue_;
  std::int64_t rows_ = 0;
  double seconds_per_row_ = 0;  ///< Moving average.
  std::int64_t batches_ = 0;
  double usual_seconds_per_row_ = 0;  ///< A slower one.
};

}  // namespace dmoe::expert_server
