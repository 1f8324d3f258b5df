// A grid's live experts as flat arrays: what one search reads. Private to gating/.
#pragma once

#include "gating/ban_list.hpp"
#include "gating/beam_search.hpp"
#include "gating/directory_cache.hpp"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace dmoe::gating {

/// The tree of known prefixes, one array per depth, children of a node side by side. Immutable once built, so searches
/// read it without a lock. Subtrees without a live expert are left out; prefixes nobody asked about are leaves too,
/// marked as such.
class ExpertTable {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  using Node = std::uint32_t;

  /// Nodes of one depth: depth 1 are first coordinates, depth D are experts.
  struct Depth {
    std::vector<Coordinate> coordinate;
    std::vector<Node> parent;           ///< In the depth above.
    std::vector<Node> first_child;      ///< In the depth below; one more entry than nodes.
    std::vector<std::uint8_t> unknown;  ///< 1: nobody asked the directory about this prefix yet.
    std::size_t size() const noexcept { return coordinate.size(); }
  };

  static std::shared_ptr<const ExpertTable> build(const std::string& grid, const std::vector<std::size_t>& grid_size,
                                                  const DirectoryCache& cache, const BanView* bans, TimePoint now);

  const std::vector<Depth>& depths() const noexcept { return depths_; }
  const std::vector<LiveExpert>& experts() const noexcept { return experts_; }
  bool root_unknown() const noexcept { return root_unknown_; }
  bool has_unknown() const noexcept { return root_unknown_ || unknown_nodes_ > 0; }
  /// Prefixes the directory gave no answer about: experts below them are missing here.
  std::size_t failed_prefixes() const noexcept { return failed_prefixes_; }
  std::size_t banned_experts() const noexcept { return banned_experts_; }

  /// The prefix of a node. @pre depth < number of dimensions
  ExpertPrefix prefix_of(std::size_t depth, Node node) const;

  /// All prefixes this table came from, and when the first of them is worth asking about again.
  const std::vector<ExpertPrefix>& sources() const noexcept { return sources_; }
  TimePoint refresh_at() const noexcept { return refresh_at_; }
  /// From then on a listing has run out or a ban has ended: build again.
  TimePoint good_until() const noexcept { return good_until_; }
  std::uint64_t cache_generation() const noexcept { return cache_generation_; }
  std::uint64_t ban_generation() const noexcept { return ban_generation_; }

 private:
  class Builder;

  std::string grid_;
  std::vector<Depth> depths_;  // [d] holds prefixes of length d + 1.
  std::vector<LiveExpert> experts_;
  std::vector<ExpertPrefix> sources_;
  std::size_t unknown_nodes_ = 0;
  std::size_t failed_prefixes_ = 0;
  std::size_t banned_experts_ = 0;
  bool root_unknown_ = false;
  TimePoint refresh_at_ = TimePoint::max();
  TimePoint good_until_ = TimePoint::max();
  std::uint64_t cache_generation_ = 0;
  std::uint64_t ban_generation_ = 0;
};

}  // namespace dmoe::gating
