// The search of one row over one table: plain arithmetic, no waiting. Private to gating/.
#pragma once

#include "gating/expert_table.hpp"

#include <cstdint>
#include <span>
#include <vector>

namespace dmoe::gating {

/// A prefix that nobody asked about and that may hold something better than the row's k-th expert.
struct OpenPrefix {
  float bound = 0;  ///< No expert below it scores higher for this row.
  std::uint32_t depth = 0;
  ExpertTable::Node node = 0;
};

/// Branch and bound. Reusable for many rows, so that a batch allocates once.
class RowScan {
 public:
  RowScan(const ExpertTable& table, std::span<const std::size_t> grid_size, std::size_t k);

  /// @param logits one array of grid_size[d] floats per dimension. @param best room for k choices, filled best first.
  /// @return how many were found.
  std::uint32_t run(std::span<const float* const> logits, std::size_t row, Choice* best);

  /// After `run`: what it could not look into, best bound first.
  std::vector<OpenPrefix>& open() noexcept { return open_; }

 private:
  void visit(std::size_t depth, ExpertTable::Node begin, ExpertTable::Node end, float score);
  void visit_experts(ExpertTable::Node begin, ExpertTable::Node end, float score);
  void descend(std::size_t depth, ExpertTable::Node node, float score);
  void offer(ExpertTable::Node expert, float score);
  float bound(std::size_t depth, float score) const;

  const ExpertTable& table_;
  const std::span<const std::size_t> grid_size_;
  const std::size_t k_;
  std::vector<const float*> logits_;  // Of the row, one per dimension.
  std::vector<float> maxima_;         // Of the row's logits, one per dimension.
  std::vector<OpenPrefix> open_;
  Choice* best_ = nullptr;
  std::uint32_t found_ = 0;
  float worst_ = 0;  // Score to beat: the k-th best so far, -inf while there are fewer.
};

}  // namespace dmoe::gating
