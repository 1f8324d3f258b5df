#include "dht/write_behind.hpp"

#include <rocksdb/write_batch.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

namespace dmoe::dht {
namespace {

constexpr std::size_t kBatchBytes = 1U << 20U;
constexpr std::chrono::seconds kReopenPause{5};
constexpr std::chrono::seconds kStopPatience{2};  // For the last batch on a disk that may be full.

/// The database's LOCK file is held, by a reader of the old handle for example: nothing is damaged.
bool is_lock_conflict(const rocksdb::Status& status) {
  return status.IsIOError() && status.ToString().find("/LOCK") != std::string::npos;
}

}  // namespace

WriteBehind::WriteBehind(std::filesystem::path database, const rocksdb::Options& options, PatientEnv& env)
    : path_(std::move(database)), options_(options), env_(env), db_(open_database()) {
  broken_ = db_ == nullptr;
  writer_ = std::thread([this] { write_loop(); });
}

WriteBehind::~WriteBehind() {
  {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
    // A full disk must not hold up the end of the process: what waits for space is given up.
    written_.wait_for(lock, kStopPatience, [this] { return changes_.empty() || broken_; });
  }
  env_.give_up();
  writer_.join();
}

std::shared_ptr<rocksdb::DB> WriteBehind::database() const {
  const std::lock_guard lock(mutex_);
  return db_;
}

/// Opens; moves a damaged database aside and opens a new one. Nothing: neither worked.
std::shared_ptr<rocksdb::DB> WriteBehind::open_database() {
  for (const bool second_try : {false, true}) {
    rocksdb::DB* raw = nullptr;
    const rocksdb::Status status = rocksdb::DB::Open(options_, path_.string(), &raw);
    if (status.ok()) return std::shared_ptr<rocksdb::DB>(raw);
    if (second_try || is_lock_conflict(status) || status.IsNoSpace()) {
      spdlog::warn("dht: cannot open the record store {}: {}; records stay in memory", path_.string(),
                   status.ToString());
      return nullptr;
    }
    move_aside(path_, status.ToString());
  }
  return nullptr;
}

void WriteBehind::change(const std::string& key, std::optional<std::string> value) {
  const std::lock_guard lock(mutex_);
  Change& change = changes_[key];
  if (change.version != 0) backlog_ -= key.size() + (change.value ? change.value->size() : 0);
  backlog_ += key.size() + (value ? value->size() : 0);
  change = {std::move(value), ++versions_};
  changed_.notify_one();
}

std::optional<std::string> WriteBehind::get(const std::string& key) {
  std::shared_ptr<rocksdb::DB> db;
  {
    const std::lock_guard lock(mutex_);
    const auto found = changes_.find(key);
    if (found != changes_.end()) return found->second.value;
    db = db_;
  }
  if (!db) return {};
  std::string value;
  const rocksdb::Status status = db->Get({}, key, &value);
  if (status.ok()) return value;
  if (!status.IsNotFound()) report(status);
  return {};
}

void WriteBehind::scan(const std::string& from, const std::string& prefix,
                       const std::function<bool(const std::string& key, std::string_view value)>& visitor) {
  // What waits overrides what is written, so both are walked side by side.
  std::map<std::string, std::optional<std::string>> waiting;
  std::shared_ptr<rocksdb::DB> db;
  {
    const std::lock_guard lock(mutex_);
    for (auto it = changes_.lower_bound(from); it != changes_.end() && it->first.starts_with(prefix); ++it) {
      waiting.emplace(it->first, it->second.value);
    }
    db = db_;
  }
  std::unique_ptr<rocksdb::Iterator> stored;
  if (db) {
    rocksdb::ReadOptions options;
    options.total_order_seek = prefix.size() < 33;
    options.prefix_same_as_start = prefix.size() >= 33;
    stored.reset(db->NewIterator(options));
    stored->Seek(from);
  }
  auto next = waiting.begin();
  while (true) {
    const bool has_stored = stored && stored->Valid() && stored->key().starts_with(prefix);
    if (!has_stored && next == waiting.end()) break;
    const int order = !has_stored ? 1 : next == waiting.end() ? -1 : stored->key().compare(next->first);
    if (order < 0) {
      if (!visitor(stored->key().ToString(), stored->value().ToStringView())) return;
      stored->Next();
      continue;
    }
    if (next->second && !visitor(next->first, *next->second)) return;
    if (order == 0) stored->Next();
    ++next;
  }
  if (stored && !stored->status().ok()) report(stored->status());
}

std::size_t WriteBehind::backlog() const {
  const std::lock_guard lock(mutex_);
  return backlog_;
}

bool WriteBehind::degraded() const {
  const std::lock_guard lock(mutex_);
  return broken_ || env_.waiting();
}

void WriteBehind::drain() {
  std::unique_lock lock(mutex_);
  written_.wait(lock, [this] { return changes_.empty() || broken_ || env_.waiting(); });
}

void WriteBehind::report(const rocksdb::Status& status) {
  const std::lock_guard lock(mutex_);
  if (!broken_) spdlog::warn("dht: the record store {} failed: {}", path_.string(), status.ToString());
  broken_ = true;
  changed_.notify_one();
}

bool WriteBehind::write_some() {
  rocksdb::WriteBatch batch;
  std::vector<std::pair<std::string, std::uint64_t>> taken;
  const auto db = database();
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [key, change] : changes_) {
      if (batch.GetDataSize() > kBatchBytes) break;
      if (change.value) {
        batch.Put(key, *change.value);
      } else {
        batch.Delete(key);
      }
      taken.emplace_back(key, change.version);
    }
  }
  if (stamp) {
    const auto [key, value] = stamp();
    batch.Put(key, value);
  }
  const rocksdb::Status status = db->Write({}, &batch);
  if (!status.ok()) {
    report(status);
    return false;
  }
  const std::lock_guard lock(mutex_);
  for (const auto& [key, version] : taken) {
    const auto found = changes_.find(key);
    if (found == changes_.end() || found->second.version != version) continue;  // Changed again meanwhile.
    backlog_ -= key.size() + (found->second.value ? found->second.value->size() : 0);
    changes_.erase(found);
  }
  written_.notify_all();
  return true;
}

void WriteBehind::write_loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || broken_ || !changes_.empty(); });
    if (broken_) {
      written_.notify_all();
      if (stopping_) return;
      changed_.wait_for(lock, kReopenPause, [this] { return stopping_; });
      if (stopping_) return;
      auto old = std::exchange(db_, nullptr);
      lock.unlock();
      // A reader may still hold the old one: RocksDB's own lock then refuses, and the next round tries again.
      old.reset();
      auto fresh = open_database();
      lock.lock();
      db_ = std::move(fresh);
      broken_ = db_ == nullptr;
      continue;
    }
    if (changes_.empty()) {
      if (stopping_) return;
      continue;
    }
    lock.unlock();
    write_some();
    lock.lock();
  }
}

}  // namespace dmoe::dht
