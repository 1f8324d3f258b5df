// What the DHT holds: values signed by their publishers.
#pragma once

#include "dht/environment.hpp"
#include "dht/key.hpp"
#include "net/error.hpp"

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace dmoe::dht {

inline constexpr std::size_t kMaxValueBytes = 64 * 1024;
inline constexpr std::size_t kMaxSubkeyBytes = 64;
inline constexpr std::size_t kMaxBatchDepth = 16;  ///< 65,536 records share one signature at most.
inline constexpr std::chrono::hours kMaxTtl{24};   ///< Longer lifetimes are clipped to this.

/// One node of a batch's Merkle tree: SHA-256 cut to 16 bytes. Only the publisher chooses leaves, so what counts is
/// that nobody finds a second preimage.
using BatchHash = std::array<std::uint8_t, 16>;

/// A value under (key, publisher, subkey). Nobody but the publisher can replace it; a larger sequence does.
struct Record {
  Key key;
  net::PublicKey publisher{};
  std::uint64_t sequence = 0;
  std::uint32_t max_ttl_ms = 0;  ///< Signed. What remains of it travels beside the record.
  bool tombstone = false;        ///< Withdrawn: hides what it replaces, until it expires itself.
  std::string subkey;            ///< At most 64 bytes. Empty: the publisher's peer ID.
  std::vector<std::uint8_t> value;

  std::uint16_t batch_index = 0;      ///< The leaf in the tree whose root is signed.
  std::vector<BatchHash> batch_path;  ///< Siblings from leaf to root.
  net::Signature signature{};

  /// The same place in the DHT: key, publisher and subkey agree.
  bool replaces(const Record& other) const noexcept {
    return key == other.key && publisher == other.publisher && subkey == other.subkey;
  }
};

/// A record and when it ends, on this node's clock.
struct LiveRecord {
  Record record;
  TimePoint deadline;
};

/// Tells the records under one key apart, most of the time, and versions of one as well.
std::uint16_t record_tag(const Record& record) noexcept;

/// Signs all `records` with one signature: each then carries its path to the signed root.
/// @pre 1 to 65,536 records, complete but for the batch fields; their publisher is the signer.
void sign_batch(const Signer& signer, std::span<Record> records);

/// Whether the sizes are within limits; says which is not.
Result<void> check_limits(const Record& record);

/// Checks signatures, and remembers which roots were good: records of one batch cost one Ed25519 verification, and so
/// does a record read twice. Bounded memory (16 KiB). One per node.
class RecordVerifier {
 public:
  explicit RecordVerifier(const Signer& signer) : signer_(signer) {}
  bool verify(const Record& record);
  std::uint64_t signatures_checked() const noexcept { return checked_; }

 private:
  static constexpr std::size_t kRemembered = 1'024;
  const Signer& signer_;
  std::unique_ptr<std::array<BatchHash, kRemembered>> good_;  // Made at the first verification: clients may need none.
  std::uint64_t checked_ = 0;
};

/// The record's own bytes, for stores that keep it as a blob; `key` is not part of them.
std::vector<std::uint8_t> pack(const Record& record);
/// @return nothing when the bytes are not what `pack` wrote.
std::optional<Record> unpack(const Key& key, std::span<const std::uint8_t> bytes);
/// The sequence, without unpacking. @pre bytes from `pack`
std::uint64_t packed_sequence(std::span<const std::uint8_t> bytes) noexcept;

}  // namespace dmoe::dht
