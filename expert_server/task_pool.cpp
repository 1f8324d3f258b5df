#include "expert_server/task_pool.hpp"

#include <algorithm>
#include <string>
#include <utility>

namespace dmoe::expert_server {
namespace {

constexpr std::int64_t kUsualBatches = 200;
constexpr double kFirstShare = 4;

bool same_shape(const std::vector<at::Tensor>& left, const std::vector<at::Tensor>& right) {
  for (std::size_t i = 0; i < left.size(); ++i) {
    const auto a = left[i].sizes();
    const auto b = right[i].sizes();
    if (a.size() != b.size() || !std::equal(a.begin() + 1, a.end(), b.begin() + 1)) return false;
  }
  return true;
}

bool can_join(const Task& first, const Task& next) {
  return same_shape(first.inputs, next.inputs) && same_shape(first.grad_outputs, next.grad_outputs);
}

bool useless(const Task& task, TimePoint now) { return task.deadline <= now || task.reply->cancelled(); }

}  // namespace

Result<void> TaskPool::push(Task& task) {
  if (task.rows > options_.max_batch_rows) {
    return Error{Errc::kInvalidArgument,
                 "the call has " + std::to_string(task.rows) + " rows, this expert takes at most " +
                     std::to_string(options_.max_batch_rows) + " (max_batch_size): split it",
                 {}};
  }
  const auto max_rows = options_.max_batch_rows * static_cast<std::int64_t>(options_.max_queued_batches);
  if (queue_.size() >= options_.max_queued_tasks || (!queue_.empty() && rows_ + task.rows > max_rows)) {
    return Error{Errc::kOverloaded,
                 std::to_string(queue_.size()) + " calls with " + std::to_string(rows_) + " rows wait already",
                 retry_after()};
  }
  rows_ += task.rows;
  queue_.push_back(std::move(task));
  return {};
}

std::vector<Task> TaskPool::take_batch(TimePoint now, std::vector<Task>& dropped) {
  std::vector<Task> batch;
  std::deque<Task> left;
  std::int64_t taken = 0;
  bool full = false;
  while (!queue_.empty() && !full) {
    Task task = std::move(queue_.front());
    queue_.pop_front();
    if (useless(task, now)) {
      rows_ -= task.rows;
      dropped.push_back(std::move(task));
    } else if (batch.empty() || (taken + task.rows <= options_.max_batch_rows && can_join(batch.front(), task))) {
      rows_ -= task.rows;
      taken += task.rows;
      batch.push_back(std::move(task));
      full = options_.one_task_at_a_time || taken >= options_.max_batch_rows;
    } else {
      left.push_back(std::move(task));
    }
  }
  while (!left.empty()) {
    queue_.push_front(std::move(left.back()));
    left.pop_back();
  }
  return batch;
}

std::vector<Task> TaskPool::take_all() {
  std::vector<Task> all(std::make_move_iterator(queue_.begin()), std::make_move_iterator(queue_.end()));
  queue_.clear();
  rows_ = 0;
  return all;
}

TimePoint TaskPool::ready() const noexcept {
  if (rows_ >= options_.max_batch_rows) return oldest();
  return oldest() + options_.batch_timeout;
}

void TaskPool::served(std::int64_t rows, std::chrono::nanoseconds time) noexcept {
  if (rows <= 0) return;
  const double sample = std::chrono::duration<double>(time).count() / static_cast<double>(rows);
  seconds_per_row_ = seconds_per_row_ == 0 ? sample : 0.8 * seconds_per_row_ + 0.2 * sample;
  // The first batches, which find cold caches, are soon forgotten.
  batches_ = std::min(batches_ + 1, kUsualBatches);
  usual_seconds_per_row_ +=
      (sample - usual_seconds_per_row_) * std::min(1.0, kFirstShare / static_cast<double>(batches_));
}

std::chrono::nanoseconds TaskPool::expected_time(std::int64_t rows) const noexcept {
  if (seconds_per_row_ == 0) return std::chrono::hours{1};
  return std::chrono::nanoseconds(static_cast<std::int64_t>(1e9 * seconds_per_row_ * static_cast<double>(rows)));
}

std::chrono::milliseconds TaskPool::retry_after() const noexcept {
  const double seconds = seconds_per_row_ * static_cast<double>(rows_);
  return std::chrono::milliseconds(std::clamp<std::int64_t>(static_cast<std::int64_t>(seconds * 1'000), 10, 5'000));
}

}  // namespace dmoe::expert_server
