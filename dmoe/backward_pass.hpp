// One backward pass of a DMoE layer over the network. Private to dmoe/.
#pragma once

#include "dmoe/forward_pass.hpp"

#include <ATen/core/Tensor.h>

#include <vector>

namespace dmoe {

struct BackwardLimits {
  std::int64_t k_min = 1;  ///< Answers a row needs, or as many as it had in forward.
  std::chrono::milliseconds timeout;
  std::chrono::milliseconds after_k_min;
  double straggler_patience = 0;
};

/// Sends the gradients of a forward pass's answers to the experts that gave them. Belongs to one thread.
class BackwardPass {
 public:
  /// @param grad_outputs [rows, k, out…] CPU, contiguous.
  BackwardPass(Client& client, const BackwardLimits& limits, const MixtureAnswers& forward,
               const at::Tensor& grad_outputs);

  /// @return one [rows, …] gradient per input of forward; undefined for those without one (masks). Experts that fail
  /// contribute zero. Throws nothing for what servers do.
  std::vector<at::Tensor> run();

  const Pass& pass() const noexcept { return pass_; }

 private:
  static RowQuorum quorum_of(const MixtureAnswers& forward, std::int64_t k_min);
  void launch();
  Result<void> accept(std::size_t call, const std::vector<at::Tensor>& tensors);
  Result<at::Tensor> check_gradient(const at::Tensor& gradient, const at::Tensor& input) const;

  Client& client_;
  const MixtureAnswers& forward_;
  const at::Tensor& grad_outputs_;
  Pass pass_;
  RowQuorum quorum_;
  /// Per input: [rows, k, …], each answer's rows at their places, so that the sum over k does not depend on who was
  /// first. Undefined until a first answer has a gradient for it.
  std::vector<at::Tensor> gradients_;
};

}  // namespace dmoe
