// SHA-256 of several equal pieces at once, where the processor has wide registers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace dmoe::expert_server {

using Sha256Digest = std::array<std::uint8_t, 32>;

inline constexpr std::size_t kSha256Lanes = 16;

/// Whether `sha256_lanes` works here (AVX-512). It takes half the time of the processor's own SHA instructions, which
/// are bound by how long each waits for the one before.
bool have_sha256_lanes() noexcept;

/// The SHA-256 (FIPS 180-4) of each of kSha256Lanes pieces of `piece` bytes, which lie one behind the other.
/// @pre have_sha256_lanes(), piece a multiple of 64
void sha256_lanes(const std::uint8_t* bytes, std::size_t piece, std::span<Sha256Digest, kSha256Lanes> digests);

}  // namespace dmoe::expert_server
