// Copies of records that searches left on their path. Private to dht.
#pragma once

#include "dht/record.hpp"

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

namespace dmoe::dht {

/// A copy is served for so long at most, and never longer than its record lives: nobody tells a copy that its record
/// was replaced or withdrawn, so this bounds how stale a reader can be who said that copies will do. A key that is in
/// demand is copied anew by the next search.
inline constexpr std::chrono::seconds kCacheLife{60};

/// Whole answers by key, apart from the records that this node is responsible for: nothing here is handed on, counted
/// as a holder's, or written to disk. Bounded as a whole and for each host that sends. Verified before they come here.
class PathCache {
 public:
  /// All records that a holder had under `key`, from `host`; deadlines on this node's clock. Refused without a word
  /// where there is no room. A copy of a sequence seen before never ends later than it first would have.
  void put(const Key& key, std::vector<LiveRecord> records, std::uint64_t host, TimePoint now);
  /// What is left of the answer: empty when there is none, or when part of it has expired.
  std::vector<LiveRecord> get(const Key& key, TimePoint now) const;
  /// This node holds the key's records itself now, or knows newer ones.
  void drop(const Key& key);
  /// About once a second.
  void purge(TimePoint now);
  /// Keys with a copy.
  std::size_t size() const noexcept { return answers_.size(); }

 private:
  struct Answer {
    std::vector<LiveRecord> records;  // Deadlines are the records' own.
    TimePoint fresh_until;
    TimePoint forgotten;  // Until then it is remembered, so that replays do not let it live again.
    std::uint64_t host = 0;
    std::size_t bytes = 0;
  };
  using Answers = std::unordered_map<Key, Answer>;

  bool make_room(std::size_t bytes, std::uint64_t host, TimePoint now);
  Answers::iterator erase(Answers::iterator answer);

  static constexpr std::size_t kMaxKeys = 1'024;
  static constexpr std::size_t kMaxKeysPerHost = 128;
  static constexpr std::size_t kMaxBytes = 512UL << 10U;

  Answers answers_;
  std::unordered_map<std::uint64_t, std::size_t> hosts_;  // Keys from each.
  std::size_t bytes_ = 0;
};

}  // namespace dmoe::dht
