#include "gating/beam_search.hpp"

#include "gating/expert_table.hpp"
#include "gating/row_scan.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace dmoe::gating {
namespace {

/// Prefixes guessed at in the first round, beside the root whose answer tells which of them live at all.
constexpr std::size_t kMaxGuesses = 64;
constexpr std::size_t kMaxRounds = 64;  // A directory whose answers never last must not hold a search for ever.

void check_grid(const std::string& grid, const std::vector<std::size_t>& grid_size) {
  const bool named = is_grid_name(grid);
  const bool sized = !grid_size.empty() && grid_size.size() <= kMaxGridDimensions &&
                     std::all_of(grid_size.begin(), grid_size.end(), [](std::size_t size) {
                       return size > 0 && size <= std::numeric_limits<Coordinate>::max();
                     });
  if (named && sized) return;
  throw std::invalid_argument("beam search: '" + grid + "' with " + std::to_string(grid_size.size()) +
                              " dimensions is not a grid; it needs a name such as ffn and 1 to " +
                              std::to_string(kMaxGridDimensions) + " sizes above 0");
}

}  // namespace

std::size_t BeamResult::experts() const noexcept { return table_ ? table_->experts().size() : 0; }

const LiveExpert& BeamResult::expert(std::uint32_t index) const { return table_->experts()[index]; }

/// One call of `search`: its arguments and what it gathers.
struct BeamSearch::Pass {
  std::span<const float* const> logits;
  std::size_t rows;
  std::size_t k;
  BeamResult& result;
  /// Prefixes to ask about, each once, in the order of the rows that want them.
  std::vector<std::pair<std::uint32_t, ExpertTable::Node>> wanted;
  std::vector<std::vector<std::uint8_t>> is_wanted;  // Per depth and node.
  std::vector<std::uint32_t> opened;                 // Per row and depth, with a beam width: asked about so far.
  bool certain = true;                               // No row has a prefix left that could change its answer.
};

BeamSearch::BeamSearch(std::shared_ptr<dht::PrefixResolver> resolver, std::string grid,
                       std::vector<std::size_t> grid_size, BeamSearchOptions options, std::shared_ptr<BanList> bans)
    : grid_(std::move(grid)),
      grid_size_(std::move(grid_size)),
      options_(options),
      cache_(std::move(resolver), options.cache),
      bans_(bans ? std::move(bans) : std::make_shared<BanList>()) {
  check_grid(grid_, grid_size_);
}

BeamSearch::~BeamSearch() = default;

BeamResult BeamSearch::search(std::span<const float* const> logits, std::size_t rows, std::size_t k,
                              TimePoint deadline) {
  BeamResult result;
  result.k_ = k;
  result.choices_.resize(rows * k);
  result.counts_.resize(rows);
  Pass pass{logits, rows, k, result, {}, {}, {}, true};
  if (options_.beam_width > 0) pass.opened.resize(rows * grid_size_.size());
  if (options_.time_budget.count() > 0) {
    deadline = std::min(deadline, std::chrono::steady_clock::now() + options_.time_budget);
  }
  if (rows == 0 || k == 0) return result;

  for (;;) {
    const auto now = std::chrono::steady_clock::now();
    auto table = this->table(now, true);
    if (now >= table->refresh_at()) cache_.refresh(table->sources(), now);
    scan(pass, *table);
    result.table_ = std::move(table);
    auto prefixes = missing(pass, *result.table_);
    if (prefixes.empty()) break;
    if (now >= deadline || result.rounds_ == kMaxRounds) {
      pass.certain = false;
      break;
    }
    ++result.rounds_;
    result.lookups_ += cache_.fetch(prefixes, deadline);
  }

  const bool nobody = std::all_of(result.counts_.begin(), result.counts_.end(), [](auto count) { return count == 0; });
  if (nobody && result.table_->banned_experts() > 0) {
    result.table_ = table(std::chrono::steady_clock::now(), false);
    scan(pass, *result.table_);
  }
  result.unanswered_ = result.table_->failed_prefixes();
  result.cut_short_ = !pass.certain || result.unanswered_ > 0;
  return result;
}

bool BeamSearch::look_everywhere(TimePoint deadline) {
  std::size_t left = options_.max_lookups;
  for (std::size_t round = 0; round < kMaxRounds; ++round) {
    const auto now = std::chrono::steady_clock::now();
    const auto known = table(now, true);
    if (!known->has_unknown()) return known->failed_prefixes() == 0;
    std::vector<ExpertPrefix> prefixes;
    if (known->root_unknown()) prefixes.push_back({grid_, {}});
    for (std::size_t depth = 0; depth < grid_size_.size() && !known->root_unknown(); ++depth) {
      const auto& nodes = known->depths()[depth];
      for (ExpertTable::Node node = 0; node < nodes.size(); ++node) {
        if (nodes.unknown[node] != 0) prefixes.push_back(known->prefix_of(depth, node));
      }
    }
    if (now >= deadline || prefixes.empty() || prefixes.size() > left) return false;
    left -= prefixes.size();
    cache_.fetch(prefixes, deadline);
  }
  return false;
}

std::shared_ptr<const ExpertTable> BeamSearch::table(TimePoint now, bool with_bans) {
  if (!with_bans) return ExpertTable::build(grid_, grid_size_, cache_, nullptr, now);
  {
    const std::lock_guard lock(mutex_);
    if (table_ && is_current(*table_, now)) return table_;
  }
  const auto bans = bans_->view(now);
  auto table = ExpertTable::build(grid_, grid_size_, cache_, bans.get(), now);
  const std::lock_guard lock(mutex_);
  table_ = table;
  return table;
}

bool BeamSearch::is_current(const ExpertTable& table, TimePoint now) const {
  return table.cache_generation() == cache_.generation() && table.ban_generation() == bans_->generation() &&
         now < table.good_until();
}

/// Every row over `table`, and which prefixes the rows still want to know about.
void BeamSearch::scan(Pass& pass, const ExpertTable& table) const {
  pass.certain = true;
  pass.wanted.clear();
  RowScan scan(table, grid_size_, pass.k);
  const bool has_unknown = table.has_unknown();
  if (has_unknown) {
    pass.is_wanted.assign(grid_size_.size(), {});
    for (std::size_t d = 0; d < grid_size_.size(); ++d) pass.is_wanted[d].resize(table.depths()[d].size());
  }
  for (std::size_t row = 0; row < pass.rows; ++row) {
    auto& found = pass.result.counts_[row];
    found = scan.run(pass.logits, row, pass.result.choices_.data() + row * pass.k);
    if (!has_unknown) continue;
    // Asking for everything at once saves rounds but wastes lookups while little is known: a row whose k-th expert is
    // not yet in sight excludes nothing. In two dimensions the second round is the last, so nothing is held back.
    std::size_t limit = scan.open().size();
    if (table.root_unknown()) {
      const std::size_t left = kMaxGuesses - std::min(kMaxGuesses, pass.wanted.size());
      limit = std::min(pass.rows * pass.k <= kMaxGuesses ? pass.k : 1, left);
    } else if (grid_size_.size() > 2 && found < pass.k) {
      limit = std::max<std::size_t>(4 * pass.k, 16);
    }
    for (const auto& open : scan.open()) {
      if (limit-- == 0) break;
      if (!pass.opened.empty()) {
        auto& opened = pass.opened[row * grid_size_.size() + open.depth];
        if (opened >= options_.beam_width) {
          pass.certain = false;
          continue;
        }
        ++opened;
      }
      auto& wanted = pass.is_wanted[open.depth][open.node];
      if (wanted == 0) pass.wanted.emplace_back(open.depth, open.node);
      wanted = 1;
    }
  }
}

std::vector<ExpertPrefix> BeamSearch::missing(Pass& pass, const ExpertTable& table) const {
  std::vector<ExpertPrefix> prefixes;
  if (table.root_unknown()) prefixes.push_back({grid_, {}});
  for (const auto& [depth, node] : pass.wanted) prefixes.push_back(table.prefix_of(depth, node));
  const std::size_t left = options_.max_lookups - std::min(options_.max_lookups, pass.result.lookups_);
  if (prefixes.size() > left) {
    pass.certain = false;
    prefixes.resize(left);
  }
  return prefixes;
}

}  // namespace dmoe::gating
