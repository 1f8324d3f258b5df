#include "dmoe/routing.hpp"

#include <torch/types.h>

#include <cmath>

namespace dmoe {

std::vector<at::Tensor> with_rows_of(std::vector<at::Tensor> logits, const std::vector<at::Tensor>& other,
                                     const std::vector<std::int64_t>& rows) {
  if (rows.empty()) return logits;
  const auto index = torch::tensor(rows, torch::kInt64).to(logits.front().device());
  for (std::size_t d = 0; d < logits.size(); ++d) {
    logits[d] = logits[d].index_copy(0, index, other[d].index_select(0, index));
  }
  return logits;
}

std::vector<std::uint64_t> chosen_rows(const gating::BeamResult& found) {
  std::vector<std::uint64_t> rows(found.experts(), 0);
  for (std::size_t row = 0; row < found.rows(); ++row) {
    for (const auto& choice : found.row(row)) ++rows[choice.expert];
  }
  return rows;
}

std::vector<gating::CoordinateShares> coordinate_shares(const gating::BeamResult& found,
                                                        const std::vector<std::uint64_t>& chosen,
                                                        const std::vector<std::int64_t>& grid) {
  std::vector<gating::CoordinateShares> shares(grid.size());
  for (std::size_t d = 0; d < grid.size(); ++d) {
    shares[d].load.resize(static_cast<std::size_t>(grid[d]));
    shares[d].even.resize(static_cast<std::size_t>(grid[d]));
  }
  double all = 0;
  for (const auto rows : chosen) all += static_cast<double>(rows);
  if (all == 0) return shares;
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    const auto& coordinates = found.expert(static_cast<std::uint32_t>(i)).uid.coordinates;
    for (std::size_t d = 0; d < grid.size(); ++d) {
      shares[d].load[coordinates[d]] += static_cast<double>(chosen[i]) / all;
      shares[d].even[coordinates[d]] += 1 / static_cast<double>(chosen.size());
    }
  }
  return shares;
}

double summed_entropy(const gating::BeamResult& found, const std::vector<at::Tensor>& logits) {
  std::vector<const float*> rows;
  for (const auto& dimension : logits) rows.push_back(dimension.data_ptr<float>());
  double sum = 0;
  std::vector<double> scores;
  for (std::size_t row = 0; row < found.rows(); ++row) {
    const auto choices = found.row(row);
    scores.assign(choices.size(), 0);
    double best = -std::numeric_limits<double>::infinity();
    for (std::size_t i = 0; i < choices.size(); ++i) {
      const auto& coordinates = found.expert(choices[i].expert).uid.coordinates;
      for (std::size_t d = 0; d < rows.size(); ++d) {
        scores[i] += static_cast<double>(rows[d][row * static_cast<std::size_t>(logits[d].size(1)) + coordinates[d]]);
      }
      best = std::max(best, scores[i]);
    }
    double total = 0;
    double weighted = 0;
    for (const double score : scores) {
      const double part = std::exp(score - best);
      total += part;
      weighted += part * (score - best);
    }
    if (total > 0) sum += std::log(total) - weighted / total;
  }
  return sum;
}

at::Tensor live_cells(const gating::BeamResult& found, std::size_t dimensions) {
  auto cells =
      torch::empty({static_cast<std::int64_t>(found.experts()), static_cast<std::int64_t>(dimensions)}, torch::kInt64);
  auto* next = cells.data_ptr<std::int64_t>();
  for (std::size_t i = 0; i < found.experts(); ++i) {
    for (const auto coordinate : found.expert(static_cast<std::uint32_t>(i)).uid.coordinates) *next++ = coordinate;
  }
  return cells;
}

}  // namespace dmoe
