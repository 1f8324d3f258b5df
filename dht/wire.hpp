// Datagrams as checked C++ values. Format: net/schema/dht.capnp and docs/dht-protocol.md.
#pragma once

#include "dht/record.hpp"

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

namespace dmoe::dht::wire {

inline constexpr std::size_t kMaxKeysPerFind = 32;
inline constexpr std::size_t kMaxNodes = 26;  ///< Named in one reply.
inline constexpr std::size_t kMaxRecordsPerDatagram = 16;
inline constexpr std::size_t kMaxTags = 64;      ///< Of a key's records, in a reply.
inline constexpr std::size_t kChunkBytes = 560;  ///< Of a value, beside the whole record header.
inline constexpr std::size_t kPartBytes = 896;   ///< Of a value, in a reply.

struct NodeInfo {
  NodeId id;
  Address address;
  friend bool operator==(const NodeInfo&, const NodeInfo&) = default;
};

/// A record with what remains of its lifetime; without its value when that is to be fetched in parts.
struct TravellingRecord {
  Record record;
  std::uint32_t remaining_ms = 0;
  std::uint32_t value_size = 0;  ///< record.value.size(), or larger: then record.value is empty.
  bool whole() const noexcept { return record.value.size() == value_size; }
};

struct Ping {};

struct Find {
  std::vector<Key> keys;
  std::uint8_t nodes_per_key = 0;
  bool want_records = false;
  bool allow_cached = false;
  std::uint32_t from = 0;
  std::vector<std::uint8_t> turns{};  ///< Empty, or for each key.
};

struct Store {
  std::vector<TravellingRecord> records;
  bool want_nodes = false;
  bool cache = false;  ///< Everything under one key, to be kept as a copy for other readers.
};

struct Chunk {
  TravellingRecord record;
  std::uint32_t offset = 0;
  std::vector<std::uint8_t> data;
};

struct Fetch {
  Key key;
  net::PublicKey publisher{};
  std::string subkey;
  std::uint64_t sequence = 0;
  std::uint32_t offset = 0;
};

/// Dial-back, see the schema.
struct Probe {
  enum class Stage : std::uint8_t { kAsk = 0, kRelay = 1, kKnock = 2, kDial = 3 };
  Stage stage = Stage::kAsk;
  std::uint16_t port = 0;
  std::uint64_t nonce = 0;
  Address target;  ///< With kRelay.
};

/// The fate of one record of a store.
enum class Ack : std::uint8_t {
  kStored = 0,  ///< Held and served from now on.
  kOlder = 1,   ///< A newer sequence is held.
  kBadSignature = 2,
  kBadCookie = 3,  ///< Repeat with the cookie of this reply.
  kQuota = 4,      ///< This publisher's or address's share is used up.
  kFull = 5,       ///< No room for anybody.
  kNotHolder = 6,  ///< A client, or far from the key.
  kMoreParts = 7,  ///< Chunk received, others are missing.
  kExpired = 8,
  kUnreachable = 9,  ///< Of a dial: nobody answered there.
};

struct KeyRecords {
  std::uint8_t index = 0;
  bool cached = false;
  std::uint32_t total = 0;
  std::vector<TravellingRecord> records;
  std::uint32_t from = 0;  ///< Of the first one here; 0 or less than `total`. After the last one they go round.
  std::vector<std::uint16_t> tags{};  ///< Empty, or `total`: record_tag of each, in order.
};

struct Part {
  std::uint32_t offset = 0;
  std::uint32_t total = 0;
  std::vector<std::uint8_t> data;
};

struct Reply {
  std::uint64_t done_keys = 0;
  std::optional<Address> observed;
  std::optional<Address> conflict;
  std::vector<NodeInfo> nodes;
  std::vector<KeyRecords> found;
  std::vector<Ack> acks;
  std::optional<Part> part;
  std::optional<net::Signature> proof;
};

struct Message {
  std::uint64_t transaction = 0;
  std::uint64_t cookie = 0;
  net::PublicKey sender{};
  NodeId sender_id{};  ///< Of a decoded message: the SHA-256 of `sender`.
  bool client = false;
  bool prove = false;
  std::variant<Ping, Find, Store, Chunk, Fetch, Probe, Reply> body;
};

/// One datagram's bytes; reused, so that sending allocates nothing.
class Buffer {
 public:
  std::span<const std::uint8_t> bytes() const noexcept { return {bytes_.data(), size_}; }
  /// Zero bytes up to `size`: a padded request lets the reply be as large. @pre size <= kMaxDatagram
  void pad_to(std::size_t size) noexcept;

 private:
  friend bool encode(const Message& message, Buffer& buffer);
  std::array<std::uint8_t, kMaxDatagram> bytes_;
  std::size_t size_ = 0;
};

/// @return false when the message does not fit a datagram: the caller budgets with the sizes below.
bool encode(const Message& message, Buffer& buffer);

/// Hostile bytes in, nothing or a message whose every length, count and enum is within its limits out. Never throws.
std::optional<Message> decode(std::span<const std::uint8_t> datagram) noexcept;

/// Bytes that one more of each takes in a datagram (upper bounds).
inline constexpr std::size_t kRequestOverhead = 168;  ///< A message with an empty body other than a reply.
inline constexpr std::size_t kReplyOverhead = 312;    ///< A reply with proof and addresses, else empty.
inline constexpr std::size_t kKeyRecordsOverhead = 40;
std::size_t record_size(const TravellingRecord& record) noexcept;
inline std::size_t node_size(const Address& address) noexcept { return address.is_v4() ? 40 : 56; }
/// A record whose encoding is larger than this travels in parts.
inline constexpr std::size_t kMaxInlineRecord = kMaxDatagram - kReplyOverhead - kKeyRecordsOverhead;

/// What a node signs to prove its key: the requester's nonce and key, so that a proof made for one requester is
/// worthless to another.
std::vector<std::uint8_t> proof_message(std::uint64_t transaction, const net::PublicKey& requester);

}  // namespace dmoe::dht::wire
