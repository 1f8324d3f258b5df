// Records and the routing table on disk.
#pragma once

#include "dht/record_store.hpp"
#include "net/error.hpp"

#include <filesystem>
#include <memory>

namespace dmoe::dht {

/// RocksDB behind a writer thread: `put` is visible at once and written within milliseconds in one batch with others;
/// while the disk is full or broken, records stay in memory (up to 64 MiB, then puts are refused) and are written when
/// it heals. Tuned for a million small records in under 200 MB of memory and few files. A database that does not open
/// is moved aside and made anew.
class RocksDbStore final : public RecordStore {
 public:
  /// kUnavailable: the directory is in use by another process, holds another format, or cannot be written.
  static Result<std::unique_ptr<RocksDbStore>> open(const std::filesystem::path& directory, const StoreLimits& limits);
  ~RocksDbStore() override;  ///< Writes what waits, unless the disk is full.

  PutOutcome put(const LiveRecord& live, std::uint64_t host, TimePoint now) override;
  std::size_t visit(const Key& key, TimePoint now, std::size_t from, const Visitor& visitor) override;
  std::optional<LiveRecord> get(const Key& key, const net::PublicKey& publisher, const std::string& subkey,
                                TimePoint now) override;
  std::vector<Key> keys_after(const std::optional<Key>& after, std::size_t limit, TimePoint now) override;
  void purge(TimePoint now) override;
  StoreStats stats() const override;
  void save_state(const std::vector<std::uint8_t>& state) override;
  std::vector<std::uint8_t> load_state() override;

  /// Waits until everything put so far is in the database, or the disk refuses. For tests and benchmarks.
  void flush();

  class Impl;

 private:
  explicit RocksDbStore(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace dmoe::dht
