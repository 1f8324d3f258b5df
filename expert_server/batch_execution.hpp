// Computes a batch of tasks with one expert, and answers each task.
#pragma once

#include "expert_server/expert_backend.hpp"
#include "expert_server/task.hpp"

#include <vector>

namespace dmoe::expert_server {

/// Memory in which batches are assembled, reused from batch to batch. Belongs to one device thread.
class BatchMemory {
 public:
  /// The tensors end to end along dimension 0, in host memory that `device` can copy from without waiting. For the CPU
  /// one tensor is returned as it is.
  at::Tensor concatenate(std::size_t slot, const std::vector<at::Tensor>& parts, const c10::Device& device = c10::kCPU);

 private:
  std::vector<at::Tensor> slots_;
};

/// Answers every task of `batch`: an outcome of one never depends on another.
///
/// Non-finite inputs and gradients are refused (kInvalidArgument) before anything is concatenated; gradients that are
/// too long are clipped, see clip_gradients. Tasks without rows get an answer without rows, and teach nothing. When a
/// batch of several fails as a whole, each of its tasks is tried alone, and those that pass are computed together: with
/// the same bits as without the others. A backward batch is one optimizer step.
/// @pre all tasks passed check_tensors and can be concatenated.    @return how many failed.
std::size_t execute_batch(ExpertBackend& backend, Direction direction, std::vector<Task> batch, BatchMemory& memory);

}  // namespace dmoe::expert_server
