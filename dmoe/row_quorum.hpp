// Counts per row who answered, to know when a pass may end. Private to dmoe/.
#pragma once

#include <cstdint>
#include <vector>

namespace dmoe {

class RowQuorum {
 public:
  /// @param needed answers, per row.
  explicit RowQuorum(std::vector<std::int64_t> needed) : rows_(needed.size()) {
    for (std::size_t row = 0; row < needed.size(); ++row) {
      rows_[row].needed = needed[row];
      short_ += needed[row] > 0 ? 1U : 0U;
    }
  }

  void expect(std::int64_t row) { ++at(row).pending; }
  void answer(std::int64_t row) {
    --at(row).pending;
    if (++at(row).answered == at(row).needed) --short_;
  }
  void fail(std::int64_t row) { --at(row).pending; }
  /// The row needs nothing.
  void excuse(std::int64_t row) {
    auto& counts = at(row);
    if (counts.answered < counts.needed) --short_;
    counts.needed = 0;
  }

  /// Every row has what it needs.
  bool met() const noexcept { return short_ == 0; }
  /// The row has not, and cannot from the calls in flight.
  bool lost(std::int64_t row) const {
    const auto& counts = rows_[static_cast<std::size_t>(row)];
    return counts.answered + counts.pending < counts.needed;
  }
  bool met(std::int64_t row) const {
    const auto& counts = rows_[static_cast<std::size_t>(row)];
    return counts.answered >= counts.needed;
  }
  std::int64_t answered(std::int64_t row) const { return rows_[static_cast<std::size_t>(row)].answered; }

 private:
  struct Counts {
    std::int64_t needed = 0;
    std::int64_t pending = 0;
    std::int64_t answered = 0;
  };
  Counts& at(std::int64_t row) { return rows_[static_cast<std::size_t>(row)]; }

  std::vector<Counts> rows_;
  std::size_t short_ = 0;  ///< Rows below what they need.
};

}  // namespace dmoe
