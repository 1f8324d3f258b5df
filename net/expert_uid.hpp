// Names of experts and of the prefixes under which the DHT lists them.
#pragma once

#include "net/error.hpp"

#include <compare>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace dmoe {

/// One grid coordinate. Not a batch row: rows are std::int64_t, as in libtorch.
using Coordinate = std::uint32_t;

inline constexpr std::size_t kMaxGridDimensions = 8;
inline constexpr std::size_t kMaxUidLength = 128;  ///< Bytes of a UID's text; longer ones are refused.

/// `ffn.3.` or `ffn.`: all experts whose UID starts so. An empty coordinate list names the whole grid.
struct ExpertPrefix {
  std::string grid;  ///< `[A-Za-z_][A-Za-z0-9_~-]*`, e.g. "ffn".
  std::vector<Coordinate> coordinates;

  friend auto operator<=>(const ExpertPrefix&, const ExpertPrefix&) = default;
};

/// `ffn.3.17`: the expert at (3, 17) of the 2-dimensional grid `ffn`. At least one coordinate.
struct ExpertUid {
  std::string grid;
  std::vector<Coordinate> coordinates;

  /// The prefix that lists this expert: `ffn.3.` for `ffn.3.17`.
  ExpertPrefix parent() const;

  friend auto operator<=>(const ExpertUid&, const ExpertUid&) = default;
};

/// Whether `name` is a grid name: `[A-Za-z_][A-Za-z0-9_~-]*`, at most 64 bytes.
bool is_grid_name(std::string_view name) noexcept;

/// @return kInvalidArgument when the text is not `grid.i1.i2…` with decimal coordinates without leading zeros.
Result<ExpertUid> parse_expert_uid(std::string_view text);

/// Reads "ffn." and "ffn.3."; the trailing dot is part of a prefix.
Result<ExpertPrefix> parse_expert_prefix(std::string_view text);

std::string to_string(const ExpertUid& uid);
std::string to_string(const ExpertPrefix& prefix);

/// `ffn.[0:4].[0:8]` or `ffn.3.[0:8]`: the UIDs a server may host. Ranges are half open, as in hivemind.
struct UidPattern {
  struct Range {
    Coordinate first = 0;
    Coordinate end = 0;  ///< Exclusive; > first.
  };
  std::string grid;
  std::vector<Range> dimensions;

  /// Number of UIDs the pattern names; saturates at 2^63.
  std::uint64_t size() const noexcept;
  /// The `index`-th UID in lexicographic order of coordinates. @pre index < size()
  ExpertUid at(std::uint64_t index) const;
  bool contains(const ExpertUid& uid) const noexcept;
};

/// @return kInvalidArgument naming the part that does not parse and an example that does.
Result<UidPattern> parse_uid_pattern(std::string_view text);

}  // namespace dmoe

template <>
struct std::hash<dmoe::ExpertPrefix> {
  std::size_t operator()(const dmoe::ExpertPrefix& prefix) const noexcept;
};

template <>
struct std::hash<dmoe::ExpertUid> {
  std::size_t operator()(const dmoe::ExpertUid& uid) const noexcept;
};
