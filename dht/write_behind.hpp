// A RocksDB database written by a thread of its own. Private to dht.
#pragma once

#include "dht/store_directory.hpp"

#include <rocksdb/db.h>
#include <rocksdb/options.h>

#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

namespace dmoe::dht {

/// Keys and values of bytes. Changes are visible at once and reach the disk in batches; one thread changes and reads,
/// the writer thread only writes, opens and reopens.
class WriteBehind {
 public:
  WriteBehind(std::filesystem::path database, const rocksdb::Options& options, PatientEnv& env);
  ~WriteBehind();
  WriteBehind(const WriteBehind&) = delete;
  WriteBehind& operator=(const WriteBehind&) = delete;

  /// A value, or nothing to delete the key.
  void change(const std::string& key, std::optional<std::string> value);
  std::optional<std::string> get(const std::string& key);
  /// Visits keys from `from` (inclusive) that start with `prefix`, in order; the visitor returns false to stop.
  void scan(const std::string& from, const std::string& prefix,
            const std::function<bool(const std::string& key, std::string_view value)>& visitor);
  /// Bytes that wait to be written.
  std::size_t backlog() const;
  /// No database at the moment: it broke, or the disk is full.
  bool degraded() const;
  void drain();

  /// Called by the writer before each batch for a pair to be written with it; from the writer's thread.
  std::function<std::pair<std::string, std::string>()> stamp;

 private:
  struct Change {
    std::optional<std::string> value;
    std::uint64_t version = 0;
  };
  using Changes = std::map<std::string, Change, std::less<>>;

  std::shared_ptr<rocksdb::DB> database() const;
  std::shared_ptr<rocksdb::DB> open_database();
  void write_loop();
  bool write_some();
  void report(const rocksdb::Status& status);

  std::filesystem::path path_;
  rocksdb::Options options_;
  PatientEnv& env_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::condition_variable written_;
  std::shared_ptr<rocksdb::DB> db_;  // GUARDED_BY(mutex_). Shared: a read may go on while it is replaced.
  Changes changes_;                  // GUARDED_BY(mutex_)
  std::size_t backlog_ = 0;          // GUARDED_BY(mutex_)
  std::uint64_t versions_ = 0;       // GUARDED_BY(mutex_)
  bool broken_ = false;              // GUARDED_BY(mutex_): reopen before the next write.
  bool stopping_ = false;            // GUARDED_BY(mutex_)
  std::thread writer_;
};

}  // namespace dmoe::dht
