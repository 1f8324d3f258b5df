#include "dht/path_cache.hpp"

#include "dht/record_store.hpp"

#include <algorithm>
#include <utility>

namespace dmoe::dht {
namespace {

std::size_t bytes_of(const std::vector<LiveRecord>& records) {
  std::size_t bytes = 0;
  for (const LiveRecord& live : records) {
    const Record& record = live.record;
    bytes += sizeof(LiveRecord) + record.value.size() + record.subkey.size() + record.batch_path.size() * 16;
  }
  return bytes;
}

}  // namespace

void PathCache::put(const Key& key, std::vector<LiveRecord> records, std::uint64_t host, TimePoint now) {
  if (records.empty()) return;
  if (const auto known = answers_.find(key); known != answers_.end()) {
    for (LiveRecord& live : records) {
      for (const LiveRecord& before : known->second.records) {
        if (!before.record.replaces(live.record)) continue;
        if (before.record.sequence > live.record.sequence) return;  // An older answer.
        if (before.record.sequence == live.record.sequence) live.deadline = std::min(live.deadline, before.deadline);
      }
    }
    erase(known);
  }
  Answer answer;
  answer.bytes = bytes_of(records);
  if (!make_room(answer.bytes, host, now)) return;
  answer.fresh_until = now + kCacheLife;
  answer.forgotten = now;
  for (const LiveRecord& live : records) {
    answer.fresh_until = std::min(answer.fresh_until, live.deadline);
    answer.forgotten = std::max(answer.forgotten, live.deadline + grave_time(live.record.max_ttl_ms));
  }
  answer.records = std::move(records);
  answer.host = host;
  ++hosts_[host];
  bytes_ += answer.bytes;
  answers_.emplace(key, std::move(answer));
}

std::vector<LiveRecord> PathCache::get(const Key& key, TimePoint now) const {
  const auto found = answers_.find(key);
  if (found == answers_.end() || found->second.fresh_until <= now) return {};
  return found->second.records;
}

void PathCache::drop(const Key& key) {
  if (const auto found = answers_.find(key); found != answers_.end()) erase(found);
}

void PathCache::purge(TimePoint now) {
  for (auto answer = answers_.begin(); answer != answers_.end();) {
    answer = answer->second.forgotten <= now ? erase(answer) : std::next(answer);
  }
}

/// Those that are no longer served make way first.
bool PathCache::make_room(std::size_t bytes, std::uint64_t host, TimePoint now) {
  const auto from_there = [&] {
    const auto found = hosts_.find(host);
    return found == hosts_.end() ? 0 : found->second;
  };
  const auto fits = [&] {
    return answers_.size() < kMaxKeys && bytes_ + bytes <= kMaxBytes && from_there() < kMaxKeysPerHost;
  };
  for (auto answer = answers_.begin(); !fits() && answer != answers_.end();) {
    answer = answer->second.fresh_until <= now ? erase(answer) : std::next(answer);
  }
  return fits();
}

PathCache::Answers::iterator PathCache::erase(Answers::iterator answer) {
  bytes_ -= answer->second.bytes;
  const auto host = hosts_.find(answer->second.host);
  if (--host->second == 0) hosts_.erase(host);
  return answers_.erase(answer);
}

}  // namespace dmoe::dht
