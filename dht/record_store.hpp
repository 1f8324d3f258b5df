// Where a node keeps the records it is responsible for.
#pragma once

#include "dht/record.hpp"

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace dmoe::dht {

/// Who may fill how much. Beyond a share, puts are refused; what is held already stays.
struct StoreLimits {
  std::size_t max_records = 1U << 20U;
  std::size_t max_bytes = 512UL << 20U;
  std::size_t max_records_per_publisher = 1U << 16U;
  std::size_t max_bytes_per_publisher = 64UL << 20U;
  std::size_t max_records_per_host = 1U << 17U;  ///< Several publishers may share one address.
  std::size_t max_records_per_key = 1U << 14U;
};

enum class PutOutcome { kStored, kUnchanged, kOlder, kQuota, kFull };

struct StoreStats {
  std::size_t records = 0;
  std::size_t bytes = 0;
  bool degraded = false;  ///< The disk refuses writes: new records are in memory only.
};

/// Records by (key, publisher, subkey). On the node's strand only; reads may touch a disk's page cache, writes never
/// wait for a disk. An expired record is never returned, whether or not it has been dropped yet; until it is dropped
/// it still refuses its own return (a holder cannot let it live again).
class RecordStore {
 public:
  /// Returns false to stop.
  using Visitor = std::function<bool(const LiveRecord&)>;

  virtual ~RecordStore() = default;

  /// A verified record. `host`: Address::host() of who sent it, 0 for this node itself (which has no quota).
  virtual PutOutcome put(const LiveRecord& live, std::uint64_t host, TimePoint now) = 0;
  /// Visits the key's live records ordered by (publisher, subkey), skipping the first `from`; returns how many live.
  virtual std::size_t visit(const Key& key, TimePoint now, std::size_t from, const Visitor& visitor) = 0;
  virtual std::optional<LiveRecord> get(const Key& key, const net::PublicKey& publisher, const std::string& subkey,
                                        TimePoint now) = 0;
  /// Up to `limit` keys with live records, after `after` in the store's own order; empty at the end.
  virtual std::vector<Key> keys_after(const std::optional<Key>& after, std::size_t limit, TimePoint now) = 0;
  /// Drops some of what has expired. Called about once a second; each call is short.
  virtual void purge(TimePoint now) = 0;
  virtual StoreStats stats() const = 0;

  /// A small blob that survives a restart where the store does: the routing table.
  virtual void save_state(const std::vector<std::uint8_t>& state) = 0;
  virtual std::vector<std::uint8_t> load_state() = 0;
};

/// Counts what each publisher and each sending host holds.
class UsageLedger {
 public:
  explicit UsageLedger(const StoreLimits& limits) : limits_(limits) {}

  /// Whether a new record of `bytes` fits; `host` 0: always.
  std::optional<PutOutcome> refusal(std::uint64_t publisher, std::uint64_t host, std::size_t bytes) const;
  void add(std::uint64_t publisher, std::uint64_t host, std::size_t bytes);
  void remove(std::uint64_t publisher, std::uint64_t host, std::size_t bytes);
  std::size_t records() const noexcept { return records_; }
  std::size_t bytes() const noexcept { return bytes_; }
  void clear();

  static std::uint64_t tag(const net::PublicKey& publisher) noexcept;

 private:
  struct Usage {
    std::uint32_t records = 0;
    std::uint64_t bytes = 0;
  };
  static void take(std::unordered_map<std::uint64_t, Usage>& map, std::uint64_t who, std::size_t bytes);

  StoreLimits limits_;
  std::unordered_map<std::uint64_t, Usage> publishers_;
  std::unordered_map<std::uint64_t, Usage> hosts_;
  std::size_t records_ = 0;
  std::size_t bytes_ = 0;
};

/// How long an expired record is remembered so that it cannot come back.
Duration grave_time(std::uint32_t max_ttl_ms) noexcept;

}  // namespace dmoe::dht
