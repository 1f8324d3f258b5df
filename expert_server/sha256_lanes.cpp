#include "expert_server/sha256_lanes.hpp"

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace dmoe::expert_server {

#if defined(__x86_64__)
namespace {

// Names are those of FIPS 180-4, §4.1.2 and §6.2.2. A Word holds the same word of sixteen messages.

#define DMOE_WIDE __attribute__((target("avx512f,avx512bw"), always_inline)) inline

using Word = __m512i;

constexpr std::size_t kBlock = 64;
constexpr std::size_t kWords = 16;  ///< Of a block.
constexpr int kRounds = 64;

constexpr std::array<std::uint32_t, kRounds> kRoundConstants{
    0x428A2F98, 0x71374491, 0xB5C0FBCF, 0xE9B5DBA5, 0x3956C25B, 0x59F111F1, 0x923F82A4, 0xAB1C5ED5,
    0xD807AA98, 0x12835B01, 0x243185BE, 0x550C7DC3, 0x72BE5D74, 0x80DEB1FE, 0x9BDC06A7, 0xC19BF174,
    0xE49B69C1, 0xEFBE4786, 0x0FC19DC6, 0x240CA1CC, 0x2DE92C6F, 0x4A7484AA, 0x5CB0A9DC, 0x76F988DA,
    0x983E5152, 0xA831C66D, 0xB00327C8, 0xBF597FC7, 0xC6E00BF3, 0xD5A79147, 0x06CA6351, 0x14292967,
    0x27B70A85, 0x2E1B2138, 0x4D2C6DFC, 0x53380D13, 0x650A7354, 0x766A0ABB, 0x81C2C92E, 0x92722C85,
    0xA2BFE8A1, 0xA81A664B, 0xC24B8B70, 0xC76C51A3, 0xD192E819, 0xD6990624, 0xF40E3585, 0x106AA070,
    0x19A4C116, 0x1E376C08, 0x2748774C, 0x34B0BCB5, 0x391C0CB3, 0x4ED8AA4A, 0x5B9CCA4F, 0x682E6FF3,
    0x748F82EE, 0x78A5636F, 0x84C87814, 0x8CC70208, 0x90BEFFFA, 0xA4506CEB, 0xBEF9A3F7, 0xC67178F2};
constexpr std::array<std::uint32_t, 8> kInitialHash{0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                                                    0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};

DMOE_WIDE Word sum(Word a, Word b) { return _mm512_add_epi32(a, b); }
DMOE_WIDE Word parity(Word a, Word b, Word c) { return _mm512_ternarylogic_epi32(a, b, c, 0x96); }
DMOE_WIDE Word choice(Word e, Word f, Word g) { return _mm512_ternarylogic_epi32(e, f, g, 0xCA); }
DMOE_WIDE Word majority(Word a, Word b, Word c) { return _mm512_ternarylogic_epi32(a, b, c, 0xE8); }
template <int kFirst, int kSecond, int kThird>
DMOE_WIDE Word big_sigma(Word x) {
  return parity(_mm512_ror_epi32(x, kFirst), _mm512_ror_epi32(x, kSecond), _mm512_ror_epi32(x, kThird));
}
template <int kFirst, int kSecond, int kShift>
DMOE_WIDE Word small_sigma(Word x) {
  return parity(_mm512_ror_epi32(x, kFirst), _mm512_ror_epi32(x, kSecond), _mm512_srli_epi32(x, kShift));
}

/// Rows become columns.
DMOE_WIDE void transpose(Word (&rows)[kWords]) {
  Word pairs[kWords];
  for (std::size_t i = 0; i < kWords; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (std::size_t i = 0; i < kWords; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
  }
  constexpr int kEvenQuarters = 0x88;
  constexpr int kOddQuarters = 0xDD;
  for (std::size_t i = 0; i < 4; ++i) {
    pairs[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], kEvenQuarters);
    pairs[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], kOddQuarters);
    pairs[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], kEvenQuarters);
    pairs[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], kOddQuarters);
  }
  for (std::size_t i = 0; i < 4; ++i) {
    rows[i] = _mm512_shuffle_i32x4(pairs[i], pairs[i + 8], kEvenQuarters);
    rows[i + 8] = _mm512_shuffle_i32x4(pairs[i], pairs[i + 8], kOddQuarters);
    rows[i + 4] = _mm512_shuffle_i32x4(pairs[i + 4], pairs[i + 12], kEvenQuarters);
    rows[i + 12] = _mm512_shuffle_i32x4(pairs[i + 4], pairs[i + 12], kOddQuarters);
  }
}

/// One round. `hash` is not moved along: working variable a is hash[-round mod 8].
DMOE_WIDE void do_round(Word (&hash)[8], int round, Word schedule) {
  const auto at = [round](int variable) { return static_cast<std::size_t>((variable - round) & 7); };
  const Word constant = _mm512_set1_epi32(static_cast<int>(kRoundConstants[static_cast<std::size_t>(round)]));
  const Word a = hash[at(0)];
  const Word e = hash[at(4)];
  const Word first =
      sum(sum(sum(hash[at(7)], big_sigma<6, 11, 25>(e)), choice(e, hash[at(5)], hash[at(6)])), sum(schedule, constant));
  const Word second = sum(big_sigma<2, 13, 22>(a), majority(a, hash[at(1)], hash[at(2)]));
  hash[at(3)] = sum(hash[at(3)], first);
  hash[at(7)] = sum(first, second);
}

/// Goes on with `count` blocks of each message; message i begins at bytes + i * stride.
__attribute__((target("avx512f,avx512bw"))) void add_blocks(Word (&state)[8], const std::uint8_t* bytes,
                                                            std::size_t stride, std::size_t count) {
  const Word big_endian = _mm512_set4_epi32(0x0C0D0E0F, 0x08090A0B, 0x04050607, 0x00010203);
  for (std::size_t block = 0; block < count; ++block) {
    Word schedule[kWords];
    for (std::size_t i = 0; i < kWords; ++i) {
      schedule[i] = _mm512_shuffle_epi8(_mm512_loadu_si512(bytes + i * stride + block * kBlock), big_endian);
    }
    transpose(schedule);
    Word hash[8];
    for (std::size_t i = 0; i < 8; ++i) hash[i] = state[i];
#pragma GCC unroll 64
    for (int round = 0; round < kRounds; ++round) {
      const auto at = [round](int ahead) { return static_cast<std::size_t>((round + ahead) & 15); };
      if (round >= 16) {
        schedule[at(0)] = sum(sum(schedule[at(0)], small_sigma<7, 18, 3>(schedule[at(1)])),
                              sum(schedule[at(9)], small_sigma<17, 19, 10>(schedule[at(14)])));
      }
      do_round(hash, round, schedule[at(0)]);
    }
    for (std::size_t i = 0; i < 8; ++i) state[i] = sum(state[i], hash[i]);
  }
}

/// The block that ends a message of whole blocks.
std::array<std::uint8_t, kBlock> last_block(std::size_t message_bytes) {
  std::array<std::uint8_t, kBlock> block{0x80};
  const auto bits = std::uint64_t{message_bytes} * 8;
  for (std::size_t i = 0; i < 8; ++i) block[kBlock - 1 - i] = static_cast<std::uint8_t>(bits >> (8 * i));
  return block;
}

__attribute__((target("avx512f,avx512bw"))) void digest_lanes(const std::uint8_t* bytes, std::size_t piece,
                                                              std::span<Sha256Digest, kSha256Lanes> digests) {
  Word state[8];
  for (std::size_t i = 0; i < 8; ++i) state[i] = _mm512_set1_epi32(static_cast<int>(kInitialHash[i]));
  add_blocks(state, bytes, piece, piece / kBlock);
  add_blocks(state, last_block(piece).data(), 0, 1);
  alignas(kBlock) std::uint32_t words[8][kSha256Lanes];
  for (std::size_t i = 0; i < 8; ++i) _mm512_store_si512(words[i], state[i]);
  for (std::size_t lane = 0; lane < kSha256Lanes; ++lane) {
    for (std::size_t i = 0; i < 8; ++i) {
      const auto word = __builtin_bswap32(words[i][lane]);
      std::memcpy(digests[lane].data() + 4 * i, &word, sizeof(word));
    }
  }
}

#undef DMOE_WIDE

}  // namespace

bool have_sha256_lanes() noexcept {
  static const bool have = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
  return have;
}

void sha256_lanes(const std::uint8_t* bytes, std::size_t piece, std::span<Sha256Digest, kSha256Lanes> digests) {
  digest_lanes(bytes, piece, digests);
}

#else

bool have_sha256_lanes() noexcept { return false; }
void sha256_lanes(const std::uint8_t*, std::size_t, std::span<Sha256Digest, kSha256Lanes>) { std::abort(); }

#endif

}  // namespace dmoe::expert_server
