#include "dht/record.hpp"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstring>

namespace dmoe::dht {
namespace {

constexpr std::string_view kLeafDomain = "dmoe-dht-record-1";
constexpr std::string_view kInnerDomain = "dmoe-dht-inner-1";
constexpr std::string_view kRootDomain = "dmoe-dht-batch-1";
constexpr std::uint8_t kPackFormat = 1;

class Writer {
 public:
  explicit Writer(std::vector<std::uint8_t>& out) : out_(out) {}
  void bytes(std::span<const std::uint8_t> data) { out_.insert(out_.end(), data.begin(), data.end()); }
  void text(std::string_view data) { out_.insert(out_.end(), data.begin(), data.end()); }
  template <class T>
  void number(T value) {
    for (std::size_t i = 0; i < sizeof(T); ++i)
      out_.push_back(static_cast<std::uint8_t>(std::uint64_t{value} >> (8 * i)));
  }

 private:
  std::vector<std::uint8_t>& out_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::uint8_t> in) : in_(in) {}
  bool ok() const { return ok_; }
  bool at_end() const { return in_.empty(); }
  std::span<const std::uint8_t> bytes(std::size_t size) {
    if (size > in_.size()) {
      ok_ = false;
      return {};
    }
    const auto taken = in_.first(size);
    in_ = in_.subspan(size);
    return taken;
  }
  template <std::size_t N>
  void array(std::array<std::uint8_t, N>& out) {
    const auto data = bytes(N);
    std::copy(data.begin(), data.end(), out.begin());
  }
  template <class T>
  T number() {
    const auto data = bytes(sizeof(T));
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < data.size(); ++i) value |= std::uint64_t{data[i]} << (8 * i);
    return static_cast<T>(value);
  }

 private:
  std::span<const std::uint8_t> in_;
  bool ok_ = true;
};

BatchHash cut(const Bits& hash) {
  BatchHash result;
  std::copy_n(hash.begin(), result.size(), result.begin());
  return result;
}

/// Over everything that the publisher vouches for; what remains of the lifetime is not among it.
BatchHash leaf_of(const Record& record) {
  std::vector<std::uint8_t> buffer;
  buffer.reserve(128 + record.subkey.size() + record.value.size());
  Writer writer(buffer);
  writer.text(kLeafDomain);
  writer.bytes(record.key.bytes);
  writer.bytes(record.publisher);
  writer.number(record.sequence);
  writer.number(record.max_ttl_ms);
  writer.number(static_cast<std::uint8_t>(record.tombstone));
  writer.number(static_cast<std::uint32_t>(record.subkey.size()));
  writer.text(record.subkey);
  writer.number(static_cast<std::uint32_t>(record.value.size()));
  writer.bytes(record.value);
  return cut(net::sha256(buffer));
}

BatchHash inner_of(const BatchHash& left, const BatchHash& right) {
  std::array<std::uint8_t, kInnerDomain.size() + 32> buffer;
  auto out = std::copy(kInnerDomain.begin(), kInnerDomain.end(), buffer.begin());
  out = std::copy(left.begin(), left.end(), out);
  std::copy(right.begin(), right.end(), out);
  return cut(net::sha256(buffer));
}

std::array<std::uint8_t, kRootDomain.size() + 16> root_message(const BatchHash& root) {
  std::array<std::uint8_t, kRootDomain.size() + 16> message;
  std::copy(root.begin(), root.end(), std::copy(kRootDomain.begin(), kRootDomain.end(), message.begin()));
  return message;
}

BatchHash root_of(const Record& record) {
  BatchHash hash = leaf_of(record);
  std::uint32_t index = record.batch_index;
  for (const BatchHash& sibling : record.batch_path) {
    hash = (index & 1U) != 0 ? inner_of(sibling, hash) : inner_of(hash, sibling);
    index >>= 1U;
  }
  return hash;
}

}  // namespace

std::uint16_t record_tag(const Record& record) noexcept {
  // FNV-1a, 32 bits, folded.
  std::uint32_t hash = 2'166'136'261U;
  const auto add = [&](std::uint8_t byte) { hash = (hash ^ byte) * 16'777'619U; };
  for (const std::uint8_t byte : record.publisher) add(byte);
  for (int shift = 0; shift < 64; shift += 8) add(static_cast<std::uint8_t>(record.sequence >> shift));
  for (const char c : record.subkey) add(static_cast<std::uint8_t>(c));
  return static_cast<std::uint16_t>(hash ^ (hash >> 16U));
}

void sign_batch(const Signer& signer, std::span<Record> records) {
  assert(!records.empty() && records.size() <= (1U << kMaxBatchDepth));
  std::vector<BatchHash> level(std::bit_ceil(records.size()));  // Padded with zero leaves.
  std::transform(records.begin(), records.end(), level.begin(), leaf_of);
  for (std::size_t i = 0; i < records.size(); ++i) {
    records[i].batch_index = static_cast<std::uint16_t>(i);
    records[i].batch_path.clear();
  }
  for (unsigned depth = 0; level.size() > 1; ++depth) {
    for (std::size_t i = 0; i < records.size(); ++i) records[i].batch_path.push_back(level[(i >> depth) ^ 1U]);
    for (std::size_t i = 0; i < level.size() / 2; ++i) level[i] = inner_of(level[2 * i], level[2 * i + 1]);
    level.resize(level.size() / 2);
  }
  const net::Signature signature = signer.sign(root_message(level.front()));
  for (Record& record : records) record.signature = signature;
}

Result<void> check_limits(const Record& record) {
  if (record.value.size() > kMaxValueBytes) {
    return Error{Errc::kInvalidArgument,
                 "a DHT value of " + std::to_string(record.value.size()) + " bytes is over the limit of " +
                     std::to_string(kMaxValueBytes) + ": split it over several subkeys",
                 {}};
  }
  if (record.subkey.size() > kMaxSubkeyBytes) {
    return Error{Errc::kInvalidArgument,
                 "a DHT subkey of " + std::to_string(record.subkey.size()) + " bytes is over the limit of " +
                     std::to_string(kMaxSubkeyBytes),
                 {}};
  }
  if (record.max_ttl_ms == 0) return Error{Errc::kInvalidArgument, "a DHT record needs a lifetime above zero", {}};
  return {};
}

bool RecordVerifier::verify(const Record& record) {
  if (record.batch_path.size() > kMaxBatchDepth || record.max_ttl_ms == 0) return false;
  const BatchHash root = root_of(record);
  std::array<std::uint8_t, 32 + 16 + 64> identity;
  auto out = std::copy(record.publisher.begin(), record.publisher.end(), identity.begin());
  out = std::copy(root.begin(), root.end(), out);
  std::copy(record.signature.begin(), record.signature.end(), out);
  const BatchHash tag = cut(net::sha256(identity));
  if (!good_) good_ = std::make_unique<std::array<BatchHash, kRemembered>>();
  BatchHash& slot = (*good_)[(tag[0] | std::size_t{tag[1]} << 8U) % kRemembered];
  if (slot == tag) return true;
  ++checked_;
  if (!signer_.verify(record.publisher, root_message(root), record.signature)) return false;
  slot = tag;
  return true;
}

std::vector<std::uint8_t> pack(const Record& record) {
  std::vector<std::uint8_t> bytes;
  bytes.reserve(128 + record.subkey.size() + record.value.size() + record.batch_path.size() * 16);
  Writer writer(bytes);
  writer.number(kPackFormat);
  writer.number(record.sequence);
  writer.number(record.max_ttl_ms);
  writer.number(static_cast<std::uint8_t>(record.tombstone));
  writer.number(static_cast<std::uint8_t>(record.subkey.size()));
  writer.number(static_cast<std::uint8_t>(record.batch_path.size()));
  writer.number(record.batch_index);
  writer.bytes(record.publisher);
  writer.bytes(record.signature);
  for (const BatchHash& hash : record.batch_path) writer.bytes(hash);
  writer.text(record.subkey);
  writer.bytes(record.value);
  return bytes;
}

std::optional<Record> unpack(const Key& key, std::span<const std::uint8_t> bytes) {
  Reader reader(bytes);
  Record record;
  record.key = key;
  const auto format = reader.number<std::uint8_t>();
  record.sequence = reader.number<std::uint64_t>();
  record.max_ttl_ms = reader.number<std::uint32_t>();
  record.tombstone = reader.number<std::uint8_t>() != 0;
  const auto subkey_size = reader.number<std::uint8_t>();
  const auto depth = reader.number<std::uint8_t>();
  record.batch_index = reader.number<std::uint16_t>();
  reader.array(record.publisher);
  reader.array(record.signature);
  if (!reader.ok() || format != kPackFormat || depth > kMaxBatchDepth || subkey_size > kMaxSubkeyBytes) return {};
  record.batch_path.resize(depth);
  for (BatchHash& hash : record.batch_path) reader.array(hash);
  const auto subkey = reader.bytes(subkey_size);
  if (!reader.ok()) return {};
  record.subkey.assign(subkey.begin(), subkey.end());
  const std::size_t used = 1 + 8 + 4 + 1 + 1 + 1 + 2 + 32 + 64 + std::size_t{depth} * 16 + subkey_size;
  const auto value = bytes.subspan(used);
  if (value.size() > kMaxValueBytes) return {};
  record.value.assign(value.begin(), value.end());
  return record;
}

std::uint64_t packed_sequence(std::span<const std::uint8_t> bytes) noexcept {
  Reader reader(bytes.subspan(1));
  return reader.number<std::uint64_t>();
}

}  // namespace dmoe::dht
