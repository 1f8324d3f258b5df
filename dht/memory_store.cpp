#include "dht/memory_store.hpp"

#include <algorithm>
#include <cstring>

namespace dmoe::dht {
namespace {

/// Where `pack` puts what the order needs.
struct PackedIdentity {
  std::span<const std::uint8_t> publisher;
  std::string_view subkey;
  std::uint32_t max_ttl_ms = 0;

  explicit PackedIdentity(std::span<const std::uint8_t> bytes) {
    std::memcpy(&max_ttl_ms, bytes.data() + 9, 4);
    const std::size_t subkey_size = bytes[14];
    const std::size_t depth = bytes[15];
    publisher = bytes.subspan(18, 32);
    subkey = {reinterpret_cast<const char*>(bytes.data()) + 114 + depth * sizeof(BatchHash), subkey_size};
  }
};

int compare(std::span<const std::uint8_t> bytes, const net::PublicKey& publisher, std::string_view subkey) {
  const PackedIdentity identity(bytes);
  const int order = std::memcmp(identity.publisher.data(), publisher.data(), publisher.size());
  return order != 0 ? order : identity.subkey.compare(subkey);
}

std::uint64_t publisher_tag(std::span<const std::uint8_t> bytes) {
  net::PublicKey publisher;
  std::copy_n(PackedIdentity(bytes).publisher.begin(), publisher.size(), publisher.begin());
  return UsageLedger::tag(publisher);
}

}  // namespace

MemoryStore::Entries::iterator MemoryStore::place_of(Entries& entries, const net::PublicKey& publisher,
                                                     std::string_view subkey) {
  return std::lower_bound(entries.begin(), entries.end(), nullptr, [&](const Entry& entry, std::nullptr_t) {
    return compare(entry.bytes(), publisher, subkey) < 0;
  });
}

PutOutcome MemoryStore::put(const LiveRecord& live, std::uint64_t host, TimePoint now) {
  const Record& record = live.record;
  const std::vector<std::uint8_t> packed = pack(record);
  const std::uint64_t publisher = UsageLedger::tag(record.publisher);
  auto found = keys_.find(record.key);
  Entry* held = nullptr;
  if (found != keys_.end()) {
    const auto place = place_of(found->second, record.publisher, record.subkey);
    if (place != found->second.end() && compare(place->bytes(), record.publisher, record.subkey) == 0) held = &*place;
  }
  if (held != nullptr) {
    const std::uint64_t sequence = packed_sequence(held->bytes());
    if (sequence > record.sequence) return PutOutcome::kOlder;
    if (sequence == record.sequence) return held->deadline > now ? PutOutcome::kUnchanged : PutOutcome::kOlder;
    ledger_.remove(publisher, held->host, held->size);
    if (const auto refused = ledger_.refusal(publisher, host, packed.size())) {
      ledger_.add(publisher, held->host, held->size);
      return *refused;
    }
  } else {
    if (const auto refused = ledger_.refusal(publisher, host, packed.size())) return *refused;
    if (found == keys_.end()) found = keys_.try_emplace(record.key).first;
    if (host != 0 && found->second.size() >= limits_.max_records_per_key) return PutOutcome::kQuota;
    held = &*found->second.emplace(place_of(found->second, record.publisher, record.subkey));
  }
  held->deadline = live.deadline;
  held->host = host;
  held->size = static_cast<std::uint32_t>(packed.size());
  held->packed = std::make_unique_for_overwrite<std::uint8_t[]>(packed.size());
  std::copy(packed.begin(), packed.end(), held->packed.get());
  ledger_.add(publisher, host, packed.size());
  return PutOutcome::kStored;
}

std::size_t MemoryStore::visit(const Key& key, TimePoint now, std::size_t from, const Visitor& visitor) {
  const auto found = keys_.find(key);
  if (found == keys_.end()) return 0;
  std::size_t live = 0;
  bool wanted = true;
  for (const Entry& entry : found->second) {
    if (entry.deadline <= now) continue;
    if (live++ < from || !wanted) continue;
    if (const auto record = unpack(key, entry.bytes())) wanted = visitor({*record, entry.deadline});
  }
  return live;
}

std::optional<LiveRecord> MemoryStore::get(const Key& key, const net::PublicKey& publisher, const std::string& subkey,
                                           TimePoint now) {
  const auto found = keys_.find(key);
  if (found == keys_.end()) return {};
  const auto place = place_of(found->second, publisher, subkey);
  if (place == found->second.end() || compare(place->bytes(), publisher, subkey) != 0) return {};
  if (place->deadline <= now) return {};
  auto record = unpack(key, place->bytes());
  if (!record) return {};
  return LiveRecord{std::move(*record), place->deadline};
}

std::vector<Key> MemoryStore::keys_after(const std::optional<Key>& after, std::size_t limit, TimePoint now) {
  std::vector<Key> keys;
  auto bucket = after ? keys_.bucket(*after) + 1 : 0;
  for (; bucket < keys_.bucket_count() && keys.size() < limit; ++bucket) {
    // Whole buckets, so that the last key names a place to go on from.
    for (auto it = keys_.begin(bucket); it != keys_.end(bucket); ++it) {
      const bool live =
          std::any_of(it->second.begin(), it->second.end(), [&](const Entry& e) { return e.deadline > now; });
      if (live) keys.push_back(it->first);
    }
  }
  return keys;
}

void MemoryStore::drop_from(Entries& entries, TimePoint now) {
  const auto forgotten = [&](const Entry& entry) {
    return entry.deadline + grave_time(PackedIdentity(entry.bytes()).max_ttl_ms) <= now;
  };
  for (const Entry& entry : entries) {
    if (forgotten(entry)) ledger_.remove(publisher_tag(entry.bytes()), entry.host, entry.size);
  }
  std::erase_if(entries, forgotten);
}

void MemoryStore::purge(TimePoint now) {
  constexpr std::size_t kRounds = 16;  // Everything is seen once in so many calls.
  const std::size_t buckets = keys_.bucket_count();
  std::vector<Key> emptied;
  for (std::size_t i = 0; i < buckets / kRounds + 1; ++i) {
    purge_bucket_ = (purge_bucket_ + 1) % buckets;
    for (auto it = keys_.begin(purge_bucket_); it != keys_.end(purge_bucket_); ++it) {
      drop_from(it->second, now);
      if (it->second.empty()) emptied.push_back(it->first);
    }
  }
  for (const Key& key : emptied) keys_.erase(key);
}

}  // namespace dmoe::dht
