#include "expert_server/piece_digest.hpp"

#include "expert_server/sha256_stream.hpp"

namespace dmoe::expert_server {

void PieceDigest::add(std::size_t index, std::span<const std::uint8_t> bytes) {
  if (index >= leaves_.size()) leaves_.resize(index + 1);
  Sha256Stream digest;
  digest.add(bytes);
  leaves_[index] = digest.finish();
}

std::string PieceDigest::finish_hex(std::uint64_t size) const {
  const auto sizes = std::to_string(size) + " " + std::to_string(kDigestPiece) + "\n";
  Sha256Stream digest;
  digest.add({reinterpret_cast<const std::uint8_t*>(sizes.data()), sizes.size()});
  for (const auto& leaf : leaves_) digest.add(leaf);
  return digest.finish_hex();
}

}  // namespace dmoe::expert_server
