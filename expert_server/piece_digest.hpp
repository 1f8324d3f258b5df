// A SHA-256 of a file that several threads can work on at once.
#pragma once

#include "expert_server/sha256_stream.hpp"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace dmoe::expert_server {

inline constexpr std::size_t kDigestPiece = 64UL * 1024;

/// The SHA-256 of the text "<size of all> <kDigestPiece>\n" and then the 32-byte SHA-256 of each piece of kDigestPiece
/// bytes (the last one may be shorter), in order. Two files with one such digest would hold a collision of SHA-256
/// itself: the sizes say where each piece lies, so either the text and the digests collide or a piece does.
class PieceDigest {
 public:
  /// Room for the pieces of `size` bytes.
  void resize(std::uint64_t size);
  /// The bytes from `offset` on: whole pieces, unless they are the last of all. They may come in any order, and on
  /// several threads once there is room for them (`resize`); otherwise they make room for themselves.
  /// @pre offset a multiple of kDigestPiece
  void add(std::uint64_t offset, std::span<const std::uint8_t> bytes);
  /// 64 lower-case hexadecimal digits. `size`: of all pieces together.
  std::string finish_hex(std::uint64_t size) const;

 private:
  std::vector<Sha256Digest> pieces_;
};

}  // namespace dmoe::expert_server
