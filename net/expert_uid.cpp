#include "net/expert_uid.hpp"

#include <charconv>
#include <limits>
#include <optional>

namespace dmoe {
namespace {

constexpr std::size_t kMaxGridNameLength = 64;

constexpr bool is_letter(char c) noexcept { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
constexpr bool is_digit(char c) noexcept { return c >= '0' && c <= '9'; }

/// A decimal number without sign or leading zeros.
std::optional<Coordinate> parse_coordinate(std::string_view text) {
  if (text.empty() || (text.size() > 1 && text.front() == '0') || !is_digit(text.front())) return std::nullopt;
  Coordinate value = 0;
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failure != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (;;) {
    const auto at = text.find(separator);
    parts.push_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

/// The grid name and coordinates of `parts`, or nothing when one of them does not parse.
std::optional<ExpertPrefix> parse_parts(const std::vector<std::string_view>& parts) {
  if (!is_grid_name(parts.front()) || parts.size() > kMaxGridDimensions + 1) return std::nullopt;
  ExpertPrefix parsed{std::string(parts.front()), {}};
  for (std::size_t i = 1; i < parts.size(); ++i) {
    const auto coordinate = parse_coordinate(parts[i]);
    if (!coordinate) return std::nullopt;
    parsed.coordinates.push_back(*coordinate);
  }
  return parsed;
}

Error not_a(std::string_view what, std::string_view text, std::string_view example) {
  // Hostile text may be long; an error never repeats more of it than a person can use.
  return {Errc::kInvalidArgument,
          "'" + std::string(text.substr(0, kMaxUidLength)) + "' is not " + std::string(what) + "; write e.g. " +
              std::string(example),
          {}};
}

std::string join(const std::string& grid, const std::vector<Coordinate>& coordinates) {
  std::string text = grid;
  for (const auto coordinate : coordinates) text += '.' + std::to_string(coordinate);
  return text;
}

std::size_t hash_of(const std::string& grid, const std::vector<Coordinate>& coordinates) noexcept {
  std::size_t hash = std::hash<std::string>{}(grid);
  for (const auto coordinate : coordinates) hash = (hash ^ coordinate) * 0x9E3779B97F4A7C15ULL;
  return hash ^ (hash >> 32U);
}

std::optional<UidPattern::Range> parse_range(std::string_view part) {
  if (const auto single = parse_coordinate(part)) {
    if (*single == std::numeric_limits<Coordinate>::max()) return std::nullopt;
    return UidPattern::Range{*single, *single + 1};
  }
  if (part.size() < 5 || part.front() != '[' || part.back() != ']') return std::nullopt;
  const auto bounds = split(part.substr(1, part.size() - 2), ':');
  if (bounds.size() != 2) return std::nullopt;
  const auto first = parse_coordinate(bounds[0]);
  const auto end = parse_coordinate(bounds[1]);
  if (!first || !end || *first >= *end) return std::nullopt;
  return UidPattern::Range{*first, *end};
}

}  // namespace

ExpertPrefix ExpertUid::parent() const { return {grid, {coordinates.begin(), coordinates.end() - 1}}; }

bool is_grid_name(std::string_view name) noexcept {
  if (name.empty() || name.size() > kMaxGridNameLength || !(is_letter(name.front()) || name.front() == '_')) {
    return false;
  }
  for (const char c : name) {
    if (!is_letter(c) && !is_digit(c) && c != '_' && c != '~' && c != '-') return false;
  }
  return true;
}

Result<ExpertUid> parse_expert_uid(std::string_view text) {
  if (text.size() <= kMaxUidLength) {
    auto parsed = parse_parts(split(text, '.'));
    if (parsed && !parsed->coordinates.empty()) {
      return ExpertUid{std::move(parsed->grid), std::move(parsed->coordinates)};
    }
  }
  return not_a("an expert UID", text, "ffn.3.17");
}

Result<ExpertPrefix> parse_expert_prefix(std::string_view text) {
  if (text.size() <= kMaxUidLength && text.ends_with('.')) {
    if (auto parsed = parse_parts(split(text.substr(0, text.size() - 1), '.'))) return std::move(*parsed);
  }
  return not_a("a UID prefix", text, "ffn.3.");
}

std::string to_string(const ExpertUid& uid) { return join(uid.grid, uid.coordinates); }
std::string to_string(const ExpertPrefix& prefix) { return join(prefix.grid, prefix.coordinates) + "."; }

std::uint64_t UidPattern::size() const noexcept {
  constexpr std::uint64_t kMost = std::uint64_t{1} << 63U;
  std::uint64_t total = 1;
  for (const auto& range : dimensions) {
    const std::uint64_t width = range.end - range.first;
    if (total > kMost / width) return kMost;
    total *= width;
  }
  return total;
}

ExpertUid UidPattern::at(std::uint64_t index) const {
  ExpertUid uid{grid, std::vector<Coordinate>(dimensions.size())};
  for (std::size_t d = dimensions.size(); d-- > 0;) {
    const std::uint64_t width = dimensions[d].end - dimensions[d].first;
    uid.coordinates[d] = dimensions[d].first + static_cast<Coordinate>(index % width);
    index /= width;
  }
  return uid;
}

bool UidPattern::contains(const ExpertUid& uid) const noexcept {
  if (uid.grid != grid || uid.coordinates.size() != dimensions.size()) return false;
  for (std::size_t d = 0; d < dimensions.size(); ++d) {
    if (uid.coordinates[d] < dimensions[d].first || uid.coordinates[d] >= dimensions[d].end) return false;
  }
  return true;
}

Result<UidPattern> parse_uid_pattern(std::string_view text) {
  constexpr std::string_view kWhat = "a UID pattern";
  constexpr std::string_view kExample = "ffn.[0:4].[0:8] (ranges exclude their end) or ffn.3.[0:8]";
  if (text.size() > kMaxUidLength) return not_a(kWhat, text, kExample);
  const auto parts = split(text, '.');
  if (!is_grid_name(parts.front()) || parts.size() < 2 || parts.size() > kMaxGridDimensions + 1) {
    return not_a(kWhat, text, kExample);
  }
  UidPattern pattern{std::string(parts.front()), {}};
  for (std::size_t i = 1; i < parts.size(); ++i) {
    const auto range = parse_range(parts[i]);
    if (!range) return not_a(kWhat, text, kExample);
    pattern.dimensions.push_back(*range);
  }
  return pattern;
}

}  // namespace dmoe

std::size_t std::hash<dmoe::ExpertPrefix>::operator()(const dmoe::ExpertPrefix& prefix) const noexcept {
  return dmoe::hash_of(prefix.grid, prefix.coordinates);
}

std::size_t std::hash<dmoe::ExpertUid>::operator()(const dmoe::ExpertUid& uid) const noexcept {
  return dmoe::hash_of(uid.grid, uid.coordinates) + 1;
}
