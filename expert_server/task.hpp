// One call on its way through a pool.
#pragma once

#include "expert_server/memory_budget.hpp"
#include "net/error.hpp"

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace dmoe::expert_server {

using TimePoint = std::chrono::steady_clock::time_point;

enum class Direction { kForward, kBackward };

/// Where a task's answer goes. One of `succeed` and `fail` is called once, from any thread.
class TaskReply {
 public:
  TaskReply() = default;
  virtual ~TaskReply() = default;
  TaskReply(const TaskReply&) = delete;
  TaskReply& operator=(const TaskReply&) = delete;

  /// Its batch of `rows` rows of `tasks` tasks is computed from now on. Called by whoever computes.
  virtual void started(TimePoint /*now*/, std::size_t /*tasks*/, std::int64_t /*rows*/) {}
  virtual void succeed(std::vector<at::Tensor> tensors) = 0;
  virtual void fail(const Error& error) = 0;
  /// Whether nobody waits any more. Checked before the device is asked.
  virtual bool cancelled() const = 0;
  virtual std::string caller() const { return "a caller"; }  ///< For logs.
};

/// Tensors that passed check_tensors, and who wants the answer. Its tensors may point into a shared receive buffer and
/// are never written to.
struct Task {
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> grad_outputs;  ///< Backward only.
  std::uint64_t rng_seed = 0;
  std::int64_t rows = 0;  ///< Dimension 0 of every tensor.
  /// Backward only: what `grad_outputs` was divided by, so that the caller's gradient can be given back undivided.
  double gradient_divisor = 1;
  TimePoint arrived;
  TimePoint deadline = TimePoint::max();
  MemoryBudget::Lease memory;  ///< Given back when the task is gone: after its answer.
  std::unique_ptr<TaskReply> reply;
};

}  // namespace dmoe::expert_server
