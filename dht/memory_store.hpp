// Records in memory: for the simulator, for nodes without a data directory, and while a disk is full.
#pragma once

#include "dht/record_store.hpp"

#include <memory>

namespace dmoe::dht {

class MemoryStore final : public RecordStore {
 public:
  explicit MemoryStore(const StoreLimits& limits = {}) : limits_(limits), ledger_(limits) {}

  PutOutcome put(const LiveRecord& live, std::uint64_t host, TimePoint now) override;
  std::size_t visit(const Key& key, TimePoint now, std::size_t from, const Visitor& visitor) override;
  std::optional<LiveRecord> get(const Key& key, const net::PublicKey& publisher, const std::string& subkey,
                                TimePoint now) override;
  std::vector<Key> keys_after(const std::optional<Key>& after, std::size_t limit, TimePoint now) override;
  void purge(TimePoint now) override;
  StoreStats stats() const override { return {ledger_.records(), ledger_.bytes(), false}; }
  void save_state(const std::vector<std::uint8_t>& state) override { state_ = state; }
  std::vector<std::uint8_t> load_state() override { return state_; }

 private:
  struct Entry {
    TimePoint deadline;
    std::uint64_t host = 0;
    std::unique_ptr<std::uint8_t[]> packed;  // One allocation a record: 100-byte values cost 0.4 KB in all.
    std::uint32_t size = 0;

    std::span<const std::uint8_t> bytes() const { return {packed.get(), size}; }
  };
  using Entries = std::vector<Entry>;

  static Entries::iterator place_of(Entries& entries, const net::PublicKey& publisher, std::string_view subkey);
  void drop_from(Entries& entries, TimePoint now);

  StoreLimits limits_;
  UsageLedger ledger_;
  std::unordered_map<Key, Entries> keys_;
  std::size_t purge_bucket_ = 0;
  std::vector<std::uint8_t> state_;
};

}  // namespace dmoe::dht
