#include "gating/expert_table.hpp"

#include <algorithm>

namespace dmoe::gating {

/// Walks the known prefixes depth first. Children of one node end up side by side, because between them only deeper
/// arrays grow; a subtree without live experts is rolled back.
class ExpertTable::Builder {
 public:
  Builder(ExpertTable& table, const std::vector<std::size_t>& grid_size, const DirectoryCache& cache,
          const BanView* bans, TimePoint now)
      : table_(table), grid_size_(grid_size), cache_(cache), bans_(bans), now_(now) {
    table_.depths_.resize(grid_size.size());
  }

  void run() {
    prefix_.grid = table_.grid_;
    const auto root = look_up();
    if (root.state == DirectoryCache::State::kKnown && grid_size_.size() > 1) {
      add_first_coordinates(*root.listing);
    } else if (root.state == DirectoryCache::State::kKnown) {
      add_children(*root.listing);
    } else {
      table_.root_unknown_ = root.state == DirectoryCache::State::kUnknown;
      if (grid_size_.size() > 1) add_every_first_coordinate();
    }
    for (std::size_t d = 0; d + 1 < table_.depths_.size(); ++d) {
      table_.depths_[d].first_child.push_back(static_cast<Node>(table_.depths_[d + 1].size()));
    }
    link_parents();
  }

 private:
  DirectoryCache::Entry look_up() {
    auto entry = cache_.find(prefix_, now_);
    if (entry.state == DirectoryCache::State::kUnknown) return entry;
    if (entry.state == DirectoryCache::State::kFailed) ++table_.failed_prefixes_;
    table_.sources_.push_back(prefix_);
    table_.good_until_ = std::min(table_.good_until_, entry.good_until);
    table_.refresh_at_ = std::min(table_.refresh_at_, entry.refresh_at);
    return entry;
  }

  void add_children(const dht::PrefixListing& listing) {
    const std::size_t depth = prefix_.coordinates.size();
    for (const auto& child : listing.children) {
      if (child.coordinate >= grid_size_[depth]) continue;  // Another trainer's idea of the grid is larger.
      if (depth + 1 == grid_size_.size()) {
        add_expert(child);
      } else {
        add_prefix(child.coordinate);
      }
    }
  }

  /// The root is the listing that most servers write to, so the likeliest to miss one for a moment: what was found by
  /// asking for a prefix directly counts as well.
  void add_first_coordinates(const dht::PrefixListing& root) {
    auto coordinates = cache_.known_below(prefix_, now_);
    for (const auto& child : root.children) coordinates.push_back(child.coordinate);
    std::sort(coordinates.begin(), coordinates.end());
    coordinates.erase(std::unique(coordinates.begin(), coordinates.end()), coordinates.end());
    for (const auto coordinate : coordinates) {
      if (coordinate < grid_size_[0]) add_prefix(coordinate);
    }
  }

  /// Without a root listing any first coordinate may have experts.
  void add_every_first_coordinate() {
    for (std::size_t i = 0; i < grid_size_[0]; ++i) add_prefix(static_cast<Coordinate>(i));
  }

  void add_prefix(Coordinate coordinate) {
    const std::size_t depth = prefix_.coordinates.size();
    const auto first_child = static_cast<Node>(table_.depths_[depth + 1].size());
    prefix_.coordinates.push_back(coordinate);
    const auto entry = look_up();
    if (entry.state == DirectoryCache::State::kKnown) add_children(*entry.listing);
    prefix_.coordinates.pop_back();

    const bool unknown = entry.state == DirectoryCache::State::kUnknown;
    if (!unknown && table_.depths_[depth + 1].size() == first_child) return;  // Nothing lives there.
    push(depth, coordinate, unknown);
    table_.depths_[depth].first_child.push_back(first_child);
    table_.unknown_nodes_ += unknown ? 1U : 0U;
  }

  void add_expert(const dht::PrefixListing::Child& child) {
    ExpertUid uid{prefix_.grid, prefix_.coordinates};
    uid.coordinates.push_back(child.coordinate);
    LiveExpert expert{std::move(uid), child.servers};
    if (bans_ != nullptr) {
      std::erase_if(expert.servers, [&](const auto& server) { return bans_->banned(expert.uid, *server); });
      if (expert.servers.size() < child.servers.size()) ++table_.banned_experts_;
    }
    if (expert.servers.empty()) return;
    table_.experts_.push_back(std::move(expert));
    push(grid_size_.size() - 1, child.coordinate, false);
  }

  void push(std::size_t depth, Coordinate coordinate, bool unknown) {
    table_.depths_[depth].coordinate.push_back(coordinate);
    table_.depths_[depth].unknown.push_back(unknown ? 1 : 0);
  }

  void link_parents() {
    for (std::size_t d = 0; d + 1 < table_.depths_.size(); ++d) {
      auto& parents = table_.depths_[d + 1].parent;
      parents.resize(table_.depths_[d + 1].size());
      const auto& first = table_.depths_[d].first_child;
      for (Node node = 0; node + 1 < first.size(); ++node) {
        std::fill(parents.begin() + first[node], parents.begin() + first[node + 1], node);
      }
    }
  }

  ExpertTable& table_;
  const std::vector<std::size_t>& grid_size_;
  const DirectoryCache& cache_;
  const BanView* bans_;
  TimePoint now_;
  ExpertPrefix prefix_;  // Where the walk is.
};

std::shared_ptr<const ExpertTable> ExpertTable::build(const std::string& grid,
                                                      const std::vector<std::size_t>& grid_size,
                                                      const DirectoryCache& cache, const BanView* bans, TimePoint now) {
  auto table = std::make_shared<ExpertTable>();
  table->grid_ = grid;
  // Read first: an answer that comes in meanwhile makes the table stale, not wrong for ever.
  table->cache_generation_ = cache.generation();
  if (bans != nullptr) {
    table->ban_generation_ = bans->generation();
    table->good_until_ = bans->first_end();
  }
  Builder(*table, grid_size, cache, bans, now).run();
  return table;
}

ExpertPrefix ExpertTable::prefix_of(std::size_t depth, Node node) const {
  ExpertPrefix prefix{grid_, std::vector<Coordinate>(depth + 1)};
  for (std::size_t d = depth + 1; d-- > 0;) {
    prefix.coordinates[d] = depths_[d].coordinate[node];
    if (d > 0) node = depths_[d].parent[node];
  }
  return prefix;
}

}  // namespace dmoe::gating
