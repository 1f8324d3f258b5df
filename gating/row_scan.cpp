#include "gating/row_scan.hpp"

#include <algorithm>
#include <limits>

namespace dmoe::gating {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

/// Eight running maxima, which the compiler keeps in vector registers. NaN never wins.
float maximum(const float* values, std::size_t count) {
  constexpr std::size_t kLanes = 8;
  float lanes[kLanes];
  std::fill(std::begin(lanes), std::end(lanes), kNothing);
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::size_t j = 0; j < kLanes; ++j) lanes[j] = values[i + j] > lanes[j] ? values[i + j] : lanes[j];
  }
  float best = kNothing;
  for (const float lane : lanes) best = lane > best ? lane : best;
  for (; i < count; ++i) best = values[i] > best ? values[i] : best;
  return best;
}

}  // namespace

RowScan::RowScan(const ExpertTable& table, std::span<const std::size_t> grid_size, std::size_t k)
    : table_(table), grid_size_(grid_size), k_(k), logits_(grid_size.size()), maxima_(grid_size.size()) {}

std::uint32_t RowScan::run(std::span<const float* const> logits, std::size_t row, Choice* best) {
  for (std::size_t d = 0; d < grid_size_.size(); ++d) {
    logits_[d] = logits[d] + row * grid_size_[d];
    if (d > 0) maxima_[d] = maximum(logits_[d], grid_size_[d]);
  }
  open_.clear();
  best_ = best;
  found_ = 0;
  worst_ = kNothing;
  visit(0, 0, static_cast<ExpertTable::Node>(table_.depths()[0].size()), 0.0F);
  if (!open_.empty()) {
    std::erase_if(open_, [this](const OpenPrefix& prefix) { return !(prefix.bound > worst_); });
    std::sort(open_.begin(), open_.end(), [](const auto& a, const auto& b) { return a.bound > b.bound; });
  }
  return found_;
}

void RowScan::visit(std::size_t depth, ExpertTable::Node begin, ExpertTable::Node end, float score) {
  if (depth + 1 == grid_size_.size()) return visit_experts(begin, end, score);
  // The most promising child first: what is found there lets the bounds exclude most of the others.
  const Coordinate* coordinates = table_.depths()[depth].coordinate.data();
  const float* logits = logits_[depth];
  auto first = end;
  float first_logit = kNothing;
  for (auto node = begin; node < end; ++node) {
    const float logit = logits[coordinates[node]];
    if (logit > first_logit) {
      first_logit = logit;
      first = node;
    }
  }
  if (first == end) return;  // All cells masked.
  if (bound(depth, score + first_logit) < worst_) return;
  descend(depth, first, score + first_logit);
  for (auto node = begin; node < end; ++node) {
    const float sum = score + logits[coordinates[node]];
    if (node == first || !(bound(depth, sum) >= worst_)) continue;
    descend(depth, node, sum);
  }
}

void RowScan::visit_experts(ExpertTable::Node begin, ExpertTable::Node end, float score) {
  const std::size_t depth = grid_size_.size() - 1;
  const Coordinate* coordinates = table_.depths()[depth].coordinate.data();
  const float* logits = logits_[depth];
  for (auto node = begin; node < end; ++node) {
    const float sum = score + logits[coordinates[node]];
    if (sum >= worst_) offer(node, sum);
  }
}

void RowScan::descend(std::size_t depth, ExpertTable::Node node, float score) {
  const auto& nodes = table_.depths()[depth];
  if (nodes.unknown[node] != 0) {
    open_.push_back({bound(depth, score), static_cast<std::uint32_t>(depth), node});
  } else {
    visit(depth + 1, nodes.first_child[node], nodes.first_child[node + 1], score);
  }
}

void RowScan::offer(ExpertTable::Node expert, float score) {
  if (score == kNothing) return;
  const auto better = [&](const Choice& other) {
    return score > other.score || (score == other.score && expert < other.expert);
  };
  if (found_ == k_ && !better(best_[k_ - 1])) return;
  std::uint32_t place = found_ < k_ ? found_++ : found_ - 1;
  for (; place > 0 && better(best_[place - 1]); --place) best_[place] = best_[place - 1];
  best_[place] = {expert, score};
  if (found_ == k_) worst_ = best_[k_ - 1].score;
}

/// Adds in the order in which an expert's score is added up, so that rounding cannot put the bound below a score.
float RowScan::bound(std::size_t depth, float score) const {
  for (std::size_t d = depth + 1; d < maxima_.size(); ++d) score += maxima_[d];
  return score;
}

}  // namespace dmoe::gating
