// A SHA-256 of a file that several threads can work on at once.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace dmoe::expert_server {

inline constexpr std::size_t kDigestPiece = 4UL * 1024 * 1024;

/// The SHA-256 of the text "<size of all> <kDigestPiece>\n" and then the 32-byte SHA-256 of each piece of kDigestPiece
/// bytes (the last one may be shorter), in order. Two files with one such digest would hold a collision of SHA-256
/// itself: the sizes say where each piece lies, so either the text and the digests collide or a piece does.
class PieceDigest {
 public:
  void resize(std::size_t pieces) { leaves_.resize(pieces); }
  /// Piece number `index`, whole. Pieces may come in any order, and on several threads once there is room for them
  /// (`resize`); otherwise each makes room for itself.
  void add(std::size_t index, std::span<const std::uint8_t> bytes);
  /// 64 lower-case hexadecimal digits. `size`: of all pieces together.
  std::string finish_hex(std::uint64_t size) const;

 private:
  using Leaf = std::array<std::uint8_t, 32>;
  std::vector<Leaf> leaves_;
};

}  // namespace dmoe::expert_server
