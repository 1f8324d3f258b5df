#include "expert_server/batch_execution.hpp"

#include "expert_server/device.hpp"
#include "expert_server/request_clipping.hpp"
#include "net/tensor_finite.hpp"

#include <torch/types.h>

#include <algorithm>
#include <utility>

namespace dmoe::expert_server {
namespace {

Error not_finite(const ExpertBackend& backend, const char* what) {
  return {
      Errc::kInvalidArgument, std::string(what) + " expert " + backend.uid_text() + " are not finite: NaN or Inf", {}};
}

bool finite(const std::vector<at::Tensor>& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), net::all_finite);
}

/// One tensor list per column of the tasks' lists, concatenated.
std::vector<at::Tensor> joined(const std::vector<Task>& tasks, std::vector<at::Tensor> Task::*list, BatchMemory& memory,
                               std::size_t first_slot, const c10::Device& device) {
  std::vector<at::Tensor> columns;
  const auto count = (tasks.front().*list).size();
  for (std::size_t i = 0; i < count; ++i) {
    std::vector<at::Tensor> parts;
    parts.reserve(tasks.size());
    for (const auto& task : tasks) parts.push_back((task.*list)[i]);
    columns.push_back(memory.concatenate(first_slot + i, parts, device));
  }
  return columns;
}

Result<std::vector<at::Tensor>> compute(ExpertBackend& backend, Direction direction, const std::vector<Task>& tasks,
                                        BatchMemory& memory) {
  const auto seed = tasks.front().rng_seed;
  const auto& device = backend.device();
  if (tasks.size() == 1 && device.is_cpu()) {
    const auto& task = tasks.front();
    return direction == Direction::kForward ? backend.forward(task.inputs, seed)
                                            : backend.backward(task.inputs, task.grad_outputs, seed);
  }
  try {
    const auto inputs = joined(tasks, &Task::inputs, memory, 0, device);
    if (direction == Direction::kForward) return backend.forward(inputs, seed);
    return backend.backward(inputs, joined(tasks, &Task::grad_outputs, memory, inputs.size(), device), seed);
  } catch (const std::exception& e) {  // Out of memory while a batch was assembled.
    return Error{Errc::kInternal, e.what(), {}};
  }
}

/// The rows of `results` that belong to one task. An output without rows (no gradient) is passed on as it is.
std::vector<at::Tensor> rows_of(const std::vector<at::Tensor>& results, std::int64_t first, std::int64_t rows,
                                std::int64_t all) {
  std::vector<at::Tensor> own;
  own.reserve(results.size());
  for (const auto& result : results) {
    own.push_back(rows == all || result.size(0) != all ? result : result.narrow(0, first, rows));
  }
  return own;
}

std::size_t answer(const ExpertBackend& backend, std::vector<Task>& tasks, const std::vector<at::Tensor>& results) {
  std::int64_t all = 0;
  for (const auto& task : tasks) all += task.rows;
  std::int64_t first = 0;
  std::size_t failed = 0;
  for (auto& task : tasks) {
    auto own = rows_of(results, first, task.rows, all);
    first += task.rows;
    if (task.gradient_divisor != 1) {
      for (auto& gradient : own) {
        if (gradient.is_floating_point()) gradient = gradient.mul(task.gradient_divisor);
      }
    }
    if (!finite(own)) {
      ++failed;
      task.reply->fail(not_finite(backend, "results of"));
    } else {
      task.reply->succeed(std::move(own));
    }
  }
  return failed;
}

std::size_t compute_apart(ExpertBackend& backend, Direction direction, std::vector<Task>& tasks, BatchMemory& memory);

std::size_t compute_and_answer(ExpertBackend& backend, Direction direction, std::vector<Task>& tasks,
                               BatchMemory& memory) {
  if (tasks.empty()) return 0;
  auto results = compute(backend, direction, tasks, memory);
  if (results) return answer(backend, tasks, *results);
  if (tasks.size() == 1) {
    tasks.front().reply->fail(results.error());
    return 1;
  }
  return compute_apart(backend, direction, tasks, memory);
}

/// After several tasks failed together: those that fail by themselves are answered so, and the others are computed
/// together, as they would have been without them.
std::size_t compute_apart(ExpertBackend& backend, Direction direction, std::vector<Task>& tasks, BatchMemory& memory) {
  std::vector<Task> sound;
  std::size_t failed = 0;
  for (auto& task : tasks) {
    auto rehearsed = backend.rehearse(task.inputs, task.grad_outputs, task.rng_seed);
    if (rehearsed) {
      sound.push_back(std::move(task));
    } else {
      ++failed;
      task.reply->fail(rehearsed.error());
    }
  }
  if (failed > 0) return failed + compute_and_answer(backend, direction, sound, memory);
  for (auto& task : sound) {  // Only together they fail: for lack of memory, say.
    std::vector<Task> alone;
    alone.push_back(std::move(task));
    failed += compute_and_answer(backend, direction, alone, memory);
  }
  return failed;
}

/// Answers a task of no rows: outputs, or gradients, without rows.
bool answer_empty(ExpertBackend& backend, Direction direction, Task& task) {
  if (direction == Direction::kBackward) {
    std::vector<at::Tensor> gradients;
    for (std::size_t i = 0; i < task.inputs.size(); ++i) {
      const bool has_gradient = backend.schema().inputs[i].requires_grad;
      gradients.push_back(has_gradient ? at::empty_like(task.inputs[i]) : at::empty({0}, at::kFloat));
    }
    task.reply->succeed(std::move(gradients));
    return true;
  }
  auto outputs = backend.forward(task.inputs, task.rng_seed);
  if (outputs) {
    task.reply->succeed(std::move(*outputs));
  } else {
    task.reply->fail(outputs.error());
  }
  return outputs.has_value();
}

}  // namespace

at::Tensor BatchMemory::concatenate(std::size_t slot, const std::vector<at::Tensor>& parts, const c10::Device& device) {
  if (parts.size() == 1 && device.is_cpu()) return parts.front();
  auto sizes = parts.front().sizes().vec();
  sizes[0] = 0;
  for (const auto& part : parts) sizes[0] += part.size(0);
  std::int64_t elements = 1;
  for (const auto size : sizes) elements *= size;
  if (slots_.size() <= slot) slots_.resize(slot + 1);
  auto& memory = slots_[slot];
  // Outputs may share storage with inputs (nop): memory that somebody still reads is left to them.
  const bool reusable = memory.defined() && memory.scalar_type() == parts.front().scalar_type() &&
                        memory.numel() >= elements && memory.storage().use_count() == 1;
  if (!reusable) memory = empty_for_copies({elements}, parts.front().scalar_type(), device);
  auto whole = memory.narrow(0, 0, elements).view(sizes);
  at::cat_out(whole, parts, 0);
  return whole;
}

std::size_t execute_batch(ExpertBackend& backend, Direction direction, std::vector<Task> batch, BatchMemory& memory) {
  std::size_t failed = 0;
  std::vector<Task> sound;
  sound.reserve(batch.size());
  for (auto& task : batch) {
    if (!finite(task.inputs) || !finite(task.grad_outputs)) {
      ++failed;
      task.reply->fail(not_finite(backend, "inputs or gradients for"));
    } else if (task.rows == 0) {
      failed += answer_empty(backend, direction, task) ? 0 : 1;
    } else {
      if (direction == Direction::kBackward) clip_gradients(task, backend.uid_text());
      sound.push_back(std::move(task));
    }
  }
  return failed + compute_and_answer(backend, direction, sound, memory);
}

}  // namespace dmoe::expert_server
