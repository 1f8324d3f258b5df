#include "expert_server/piece_digest.hpp"

#include <algorithm>

namespace dmoe::expert_server {
namespace {

std::size_t pieces_of(std::uint64_t size) { return static_cast<std::size_t>((size + kDigestPiece - 1) / kDigestPiece); }

}  // namespace

void PieceDigest::resize(std::uint64_t size) { pieces_.resize(pieces_of(size)); }

void PieceDigest::add(std::uint64_t offset, std::span<const std::uint8_t> bytes) {
  if (pieces_.size() < pieces_of(offset + bytes.size())) resize(offset + bytes.size());
  auto* next = pieces_.data() + offset / kDigestPiece;
  while (!bytes.empty()) {
    const auto piece = bytes.first(std::min(bytes.size(), kDigestPiece));
    Sha256Stream digest;
    digest.add(piece);
    *next++ = digest.finish();
    bytes = bytes.subspan(piece.size());
  }
}

std::string PieceDigest::finish_hex(std::uint64_t size) const {
  const auto sizes = std::to_string(size) + " " + std::to_string(kDigestPiece) + "\n";
  Sha256Stream digest;
  digest.add({reinterpret_cast<const std::uint8_t*>(sizes.data()), sizes.size()});
  for (const auto& piece : pieces_) digest.add(piece);
  return digest.finish_hex();
}

}  // namespace dmoe::expert_server
