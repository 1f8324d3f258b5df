#include "dht/rocksdb_store.hpp"

#include "dht/store_directory.hpp"
#include "dht/write_behind.hpp"

#include <rocksdb/cache.h>
#include <rocksdb/compaction_filter.h>
#include <rocksdb/filter_policy.h>
#include <rocksdb/slice_transform.h>
#include <rocksdb/table.h>

#include <algorithm>
#include <atomic>
#include <cstring>

namespace dmoe::dht {
namespace {

constexpr char kRecordPrefix = 'r';
constexpr std::string_view kTimeKey = "mtime";
constexpr std::string_view kStateKey = "mstate";
constexpr std::size_t kHeader = 16;                    // Expiry on the store's axis (ms) and the sender's host.
constexpr std::size_t kMaxBacklog = 64UL << 20U;       // Bytes that wait while the disk refuses.
constexpr std::size_t kPurgeAtLeast = 2'000;           // Records looked at per call.
constexpr std::size_t kPurgeRounds = 60;               // Calls until everything was seen.
constexpr std::int64_t kFilterGrace = 15 * 60 * 1000;  // The purge counts what it drops; the filter is behind it.

std::int64_t read_number(std::string_view value, std::size_t at) {
  std::int64_t number = 0;
  std::memcpy(&number, value.data() + at, 8);
  return number;
}

/// Drops what expired long ago wherever RocksDB rewrites it anyway.
class ExpiryFilter final : public rocksdb::CompactionFilter {
 public:
  explicit ExpiryFilter(const StoreTime& time) : time_(time) {}
  const char* Name() const override { return "dmoe.ExpiryFilter"; }
  bool Filter(int, const rocksdb::Slice& key, const rocksdb::Slice& value, std::string*, bool*) const override {
    if (key.empty() || key[0] != kRecordPrefix || value.size() < kHeader) return false;
    return read_number(value.ToStringView(), 0) + kFilterGrace < time_.now();
  }

 private:
  const StoreTime& time_;
};

std::string key_prefix(const Key& key) {
  std::string prefix(1, kRecordPrefix);
  prefix.append(reinterpret_cast<const char*>(key.bytes.data()), key.bytes.size());
  return prefix;
}

std::string record_key(const Key& key, const net::PublicKey& publisher, const std::string& subkey) {
  std::string text = key_prefix(key);
  text.append(reinterpret_cast<const char*>(publisher.data()), publisher.size());
  return text + subkey;
}

Key key_in(const std::string& text) {
  Key key;
  std::memcpy(key.bytes.data(), text.data() + 1, key.bytes.size());
  return key;
}

std::span<const std::uint8_t> packed_in(std::string_view value) {
  return {reinterpret_cast<const std::uint8_t*>(value.data()) + kHeader, value.size() - kHeader};
}

/// The first key after every key with this prefix.
std::string after_prefix(std::string prefix) {
  while (!prefix.empty() && static_cast<unsigned char>(prefix.back()) == 0xFF) prefix.pop_back();
  if (!prefix.empty()) prefix.back() = static_cast<char>(prefix.back() + 1);
  return prefix;
}

rocksdb::Options options_for(rocksdb::Env* env, const rocksdb::CompactionFilter* filter) {
  rocksdb::BlockBasedTableOptions table;
  table.block_cache = rocksdb::NewLRUCache(24UL << 20U);
  table.cache_index_and_filter_blocks = true;  // Else index and filters of all files stay in memory.
  table.pin_l0_filter_and_index_blocks_in_cache = true;
  table.filter_policy.reset(rocksdb::NewBloomFilterPolicy(10));
  table.block_size = 8UL << 10U;
  rocksdb::Options options;
  options.create_if_missing = true;
  options.env = env;
  options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
  options.prefix_extractor.reset(rocksdb::NewFixedPrefixTransform(33));
  options.compaction_filter = filter;
  options.write_buffer_size = 8UL << 20U;
  options.max_write_buffer_number = 2;
  options.max_total_wal_size = 16UL << 20U;
  options.target_file_size_base = 16UL << 20U;
  options.max_bytes_for_level_base = 64UL << 20U;
  options.level_compaction_dynamic_level_bytes = true;
  options.periodic_compaction_seconds = 3'600;  // So that the filter comes by.
  options.max_open_files = 128;
  options.max_background_jobs = 2;
  options.allow_fallocate = false;
  options.avoid_flush_during_shutdown = true;  // The log has it.
  options.keep_log_file_num = 2;
  options.max_log_file_size = 1UL << 20U;
  options.info_log_level = rocksdb::WARN_LEVEL;
  options.stats_dump_period_sec = 0;
  options.stats_persist_period_sec = 0;
  options.max_manifest_file_size = 4UL << 20U;
  options.wal_recovery_mode = rocksdb::WALRecoveryMode::kPointInTimeRecovery;
  options.compression = rocksdb::kNoCompression;  // Signatures and hashes do not shrink.
  return options;
}

std::string saved_time(const std::filesystem::path& file, rocksdb::Env* env) {
  rocksdb::Options options;
  options.env = env;
  options.prefix_extractor.reset(rocksdb::NewFixedPrefixTransform(33));
  options.info_log_level = rocksdb::FATAL_LEVEL;
  rocksdb::DB* raw = nullptr;
  std::string value;
  if (!rocksdb::DB::OpenForReadOnly(options, file.string(), &raw).ok()) return value;
  const std::unique_ptr<rocksdb::DB> db(raw);
  if (!db->Get({}, rocksdb::Slice(kTimeKey.data(), kTimeKey.size()), &value).ok()) value.clear();
  return value;
}

}  // namespace

class RocksDbStore::Impl {
 public:
  Impl(std::unique_ptr<DirectoryLock> lock, const std::filesystem::path& directory, const StoreLimits& limits)
      : lock_(std::move(lock)),
        limits_(limits),
        ledger_(limits),
        next_ledger_(limits),
        time_(saved_time(directory / "records", rocksdb::Env::Default())),
        filter_(time_),
        db_(directory / "records", options_for(env_.env(), &filter_), env_) {
    db_.stamp = [this] { return std::make_pair(std::string(kTimeKey), time_.save()); };
  }

  std::int64_t expiry(TimePoint deadline, TimePoint now) const {
    return time_.now() + std::chrono::floor<std::chrono::milliseconds>(deadline - now).count();
  }
  TimePoint deadline(std::int64_t expires, TimePoint now) const {
    return now + std::chrono::milliseconds{expires - time_.now()};
  }

  std::unique_ptr<DirectoryLock> lock_;
  StoreLimits limits_;
  UsageLedger ledger_;
  UsageLedger next_ledger_;  // Counted anew in each round of the purge; replaces the other at its end.
  std::string cursor_ = std::string(1, kRecordPrefix);
  PatientEnv env_;
  StoreTime time_;
  ExpiryFilter filter_;
  WriteBehind db_;  // Last: its thread uses what is above.
};

Result<std::unique_ptr<RocksDbStore>> RocksDbStore::open(const std::filesystem::path& directory,
                                                         const StoreLimits& limits) {
  auto lock = DirectoryLock::take(directory);
  if (!lock.has_value()) return lock.error();
  if (auto format = check_format(directory); !format.has_value()) return format.error();
  return std::unique_ptr<RocksDbStore>(new RocksDbStore(std::make_unique<Impl>(std::move(*lock), directory, limits)));
}

RocksDbStore::RocksDbStore(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

RocksDbStore::~RocksDbStore() = default;

PutOutcome RocksDbStore::put(const LiveRecord& live, std::uint64_t host, TimePoint now) {
  const Record& record = live.record;
  const std::string key = record_key(record.key, record.publisher, record.subkey);
  const std::vector<std::uint8_t> packed = pack(record);
  const std::uint64_t publisher = UsageLedger::tag(record.publisher);
  const std::size_t size = key.size() + kHeader + packed.size();
  const auto held = impl_->db_.get(key);
  const bool valid = held && held->size() > kHeader;
  if (valid) {
    const std::uint64_t sequence = packed_sequence(packed_in(*held));
    const bool alive = read_number(*held, 0) > impl_->time_.now();
    if (sequence > record.sequence) return PutOutcome::kOlder;
    if (sequence == record.sequence) return alive ? PutOutcome::kUnchanged : PutOutcome::kOlder;
  } else if (const auto refused = impl_->ledger_.refusal(publisher, host, size)) {
    return *refused;
  }
  if (impl_->db_.backlog() > kMaxBacklog) return PutOutcome::kFull;
  const std::int64_t header[2] = {impl_->expiry(live.deadline, now), static_cast<std::int64_t>(host)};
  std::string value(reinterpret_cast<const char*>(header), kHeader);
  value.append(reinterpret_cast<const char*>(packed.data()), packed.size());
  impl_->db_.change(key, std::move(value));
  if (valid) return PutOutcome::kStored;
  impl_->ledger_.add(publisher, host, size);
  if (key <= impl_->cursor_) impl_->next_ledger_.add(publisher, host, size);
  return PutOutcome::kStored;
}

std::size_t RocksDbStore::visit(const Key& key, TimePoint now, std::size_t from, const Visitor& visitor) {
  const std::string prefix = key_prefix(key);
  const std::int64_t time = impl_->time_.now();
  std::size_t live = 0;
  bool wanted = true;
  impl_->db_.scan(prefix, prefix, [&](const std::string&, std::string_view value) {
    if (value.size() <= kHeader || read_number(value, 0) <= time) return true;
    if (live++ < from || !wanted) return true;
    if (auto record = unpack(key, packed_in(value))) {
      wanted = visitor({std::move(*record), impl_->deadline(read_number(value, 0), now)});
    }
    return true;
  });
  return live;
}

std::optional<LiveRecord> RocksDbStore::get(const Key& key, const net::PublicKey& publisher, const std::string& subkey,
                                            TimePoint now) {
  const auto value = impl_->db_.get(record_key(key, publisher, subkey));
  if (!value || value->size() <= kHeader || read_number(*value, 0) <= impl_->time_.now()) return {};
  auto record = unpack(key, packed_in(*value));
  if (!record) return {};
  return LiveRecord{std::move(*record), impl_->deadline(read_number(*value, 0), now)};
}

std::vector<Key> RocksDbStore::keys_after(const std::optional<Key>& after, std::size_t limit, TimePoint) {
  std::vector<Key> keys;
  std::string from = after ? after_prefix(key_prefix(*after)) : std::string(1, kRecordPrefix);
  const std::int64_t time = impl_->time_.now();
  std::size_t looked = 0;
  impl_->db_.scan(from, std::string(1, kRecordPrefix), [&](const std::string& text, std::string_view value) {
    if (text.size() < 65 || value.size() <= kHeader || read_number(value, 0) <= time) return ++looked < 16 * limit;
    const Key key = key_in(text);
    if (keys.empty() || keys.back() != key) {
      if (keys.size() == limit) return false;
      keys.push_back(key);
    }
    return true;
  });
  return keys;
}

void RocksDbStore::purge(TimePoint) {
  const std::int64_t time = impl_->time_.now();
  const std::size_t count = std::max(kPurgeAtLeast, impl_->ledger_.records() / kPurgeRounds);
  std::size_t looked = 0;
  std::vector<std::string> dead;
  bool at_end = true;
  impl_->db_.scan(
      impl_->cursor_ + '\0', std::string(1, kRecordPrefix), [&](const std::string& key, std::string_view value) {
        if (++looked > count) {
          at_end = false;
          return false;
        }
        impl_->cursor_ = key;
        const auto record =
            value.size() > kHeader && key.size() >= 65 ? unpack(key_in(key), packed_in(value)) : std::nullopt;
        const std::int64_t grave =
            record ? std::chrono::duration_cast<std::chrono::milliseconds>(grave_time(record->max_ttl_ms)).count() : 0;
        if (!record || read_number(value, 0) + grave <= time) {
          dead.push_back(key);
        } else {
          impl_->next_ledger_.add(UsageLedger::tag(record->publisher),
                                  static_cast<std::uint64_t>(read_number(value, 8)), key.size() + value.size());
        }
        return true;
      });
  for (const std::string& key : dead) impl_->db_.change(key, std::nullopt);
  if (!at_end) return;
  impl_->ledger_ = impl_->next_ledger_;
  impl_->next_ledger_.clear();
  impl_->cursor_ = std::string(1, kRecordPrefix);
}

StoreStats RocksDbStore::stats() const {
  return {impl_->ledger_.records(), impl_->ledger_.bytes(), impl_->db_.degraded()};
}

void RocksDbStore::save_state(const std::vector<std::uint8_t>& state) {
  impl_->db_.change(std::string(kStateKey), std::string(state.begin(), state.end()));
}

std::vector<std::uint8_t> RocksDbStore::load_state() {
  const auto state = impl_->db_.get(std::string(kStateKey));
  if (!state) return {};
  return {state->begin(), state->end()};
}

void RocksDbStore::flush() { impl_->db_.drain(); }

}  // namespace dmoe::dht
