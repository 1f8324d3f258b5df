// For each row of a batch, the k best experts that are alive.
#pragma once

#include "dht/prefix_resolver.hpp"
#include "gating/ban_list.hpp"
#include "gating/directory_cache.hpp"
#include "net/expert_uid.hpp"

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace dmoe::gating {

class ExpertTable;

/// An expert as the directory knows it now.
struct LiveExpert {
  ExpertUid uid;
  /// At least one; those not banned, in the directory's order (deterministic owner first).
  std::vector<std::shared_ptr<const dht::ServerAddress>> servers;
};

/// One chosen expert of one row.
struct Choice {
  std::uint32_t expert = 0;  ///< See BeamResult::expert.
  float score = 0;           ///< The sum of its coordinates' logits.
};

/// What a search found. Immutable; keeps what its experts refer to alive.
class BeamResult {
 public:
  std::size_t rows() const noexcept { return counts_.size(); }
  /// The row's experts, best first (ties: lower coordinates first); fewer than k when fewer are alive.
  std::span<const Choice> row(std::size_t row) const { return {choices_.data() + row * k_, counts_[row]}; }
  /// Experts that Choice::expert counts: 0 to `experts() - 1`.
  std::size_t experts() const noexcept;
  const LiveExpert& expert(std::uint32_t index) const;

  /// The time budget, a cap or an unanswered lookup ended the search before it was certain: a better expert may exist.
  bool cut_short() const noexcept { return cut_short_; }
  /// Prefixes this search itself asked the directory for; 0 on a warm cache.
  std::size_t lookups() const noexcept { return lookups_; }
  /// Times it waited for the directory.
  std::size_t rounds() const noexcept { return rounds_; }
  /// Prefixes about which the directory gave no answer.
  std::size_t unanswered() const noexcept { return unanswered_; }

 private:
  friend class BeamSearch;
  std::size_t k_ = 0;
  std::vector<Choice> choices_;
  std::vector<std::uint32_t> counts_;
  std::shared_ptr<const ExpertTable> table_;
  bool cut_short_ = false;
  std::size_t lookups_ = 0;
  std::size_t rounds_ = 0;
  std::size_t unanswered_ = 0;
};

struct BeamSearchOptions {
  DirectoryCacheOptions cache;
  std::size_t max_lookups = 8'192;  ///< Of one search, all rounds and rows together.
  /// Prefixes that one row may ask for in one round, best first; 0: all that could hold a better expert.
  std::size_t beam_width = 0;
  std::chrono::milliseconds time_budget{0};  ///< Besides the caller's deadline; 0: none.
};

/// Exact search over one grid: a row stops only when no prefix it has not seen could still beat its k-th expert (the
/// prefix's logits so far plus the maxima of the remaining dimensions bound everything below it), so that the answer is
/// the true top k of what the directory knows, unless cut_short() says otherwise.
///
/// Lookups are shared by all rows of the batch and by concurrent searches; answers are cached and refreshed in the
/// background while searches come in; a search on a warm cache sends nothing and takes no lock but to copy one pointer.
/// A cold search of a 2-dimensional grid takes at most two rounds: first the root and the rows' best first
/// coordinates (at most 64), then every live prefix that the bounds cannot exclude.
/// Source: Learning@home (arXiv 2002.04013), "Structured gating function". Differs: a plain beam misses the best cell
/// of a prefix outside the beam; bounds do not. Thread-safe.
class BeamSearch {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  /// @param grid a grid name. @param grid_size 1 to kMaxGridDimensions sizes, each > 0. @param bans may be shared with
  /// other searches; null: its own.
  BeamSearch(std::shared_ptr<dht::PrefixResolver> resolver, std::string grid, std::vector<std::size_t> grid_size,
             BeamSearchOptions options = {}, std::shared_ptr<BanList> bans = nullptr);
  ~BeamSearch();
  BeamSearch(const BeamSearch&) = delete;
  BeamSearch& operator=(const BeamSearch&) = delete;

  /// Blocks the calling thread while it waits for the directory, at most until `deadline`; then answers from what it
  /// has. Must not be called on the resolver's thread.
  /// @param logits one row-major [rows, grid_size[d]] array per dimension. Cells whose score is -inf or NaN are never
  /// chosen. @param k > 0.
  BeamResult search(std::span<const float* const> logits, std::size_t rows, std::size_t k, TimePoint deadline);

  /// Asks about every prefix that nobody asked about yet. A search asks only about those that could matter for its
  /// rows; after this its result's experts() are all that live. Blocks as `search`; sends nothing when all is known.
  /// @return false: the deadline, a cap or an unanswered lookup left some prefixes out.
  bool look_everywhere(TimePoint deadline);

  /// What is banned is skipped; when nothing else is left, it is tried anyway.
  BanList& bans() noexcept { return *bans_; }
  const std::string& grid() const noexcept { return grid_; }
  const std::vector<std::size_t>& grid_size() const noexcept { return grid_size_; }
  /// Prefixes asked for so far, background refreshes included.
  std::uint64_t total_lookups() const noexcept { return cache_.lookups(); }

 private:
  struct Pass;

  std::shared_ptr<const ExpertTable> table(TimePoint now, bool with_bans);
  bool is_current(const ExpertTable& table, TimePoint now) const;
  void scan(Pass& pass, const ExpertTable& table) const;
  std::vector<ExpertPrefix> missing(Pass& pass, const ExpertTable& table) const;

  const std::string grid_;
  const std::vector<std::size_t> grid_size_;
  const BeamSearchOptions options_;
  DirectoryCache cache_;
  std::shared_ptr<BanList> bans_;             // Shared with other grids' searches of the same client.
  std::mutex mutex_;                          // Held to copy or replace one pointer.
  std::shared_ptr<const ExpertTable> table_;  // Guarded by mutex_. Shared with searches that read it.
};

}  // namespace dmoe::gating
