// A layer's input as rows, and what came back for them. Private to dmoe/.
#pragma once

#include "dmoe/dmoe.hpp"
#include "dmoe/routing.hpp"
#include "gating/beam_search.hpp"

#include <torch/types.h>

#include <utility>
#include <vector>

namespace dmoe {

/// The input as rows, and how to get back.
struct DMoEImpl::Rows {
  std::vector<torch::Tensor> inputs;       ///< [R, …] each, part of the caller's graph.
  std::vector<torch::Tensor> sent;         ///< The same values: CPU, contiguous, no graph.
  torch::Tensor gate_input;                ///< [R, in_features]
  std::vector<std::int64_t> row_shape;     ///< Of one row's output.
  std::vector<std::int64_t> output_shape;  ///< Of the layer's output.

  /// `mixed` [R, …] in the input's type and the output's shape.
  torch::Tensor shaped(const torch::Tensor& mixed) const {
    return mixed.to(inputs.front().scalar_type()).reshape(output_shape);
  }
};

/// The gate's logits for the rows: one [R, grid[d]] tensor per dimension, part of the graph.
struct DMoEImpl::Logits {
  std::vector<torch::Tensor> used;   ///< Cells that dropout masks are -inf.
  std::vector<torch::Tensor> whole;  ///< Without dropout; empty where none acts.

  /// Gives `rows` all their cells back.
  void spare(const std::vector<std::int64_t>& rows) { used = with_rows_of(std::move(used), whole, rows); }
};

/// The experts' answers, part of the graph.
struct DMoEImpl::Answers {
  torch::Tensor outputs;                    ///< [R, k, …] on the input's device; zero where nobody answered.
  torch::Tensor cells;                      ///< [R, k, D] int64, CPU.
  torch::Tensor answered;                   ///< [R, k] bool, CPU.
  std::vector<std::int64_t> over_capacity;  ///< Rows.
  gating::BeamResult choices;               ///< Before anything failed.
};

}  // namespace dmoe
