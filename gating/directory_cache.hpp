// What the directory said about UID prefixes, for as long as it is good.
#pragma once

#include "dht/prefix_resolver.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace dmoe::gating {

struct DirectoryCacheOptions {
  std::chrono::milliseconds ttl{15'000};            ///< A listing in use is asked for again after this, or earlier
                                                    ///< when its records expire sooner.
  std::chrono::milliseconds negative_ttl{5'000};    ///< "Nothing lives there" holds for this long.
  std::chrono::milliseconds lookup_timeout{3'000};  ///< Given to the resolver for one lookup.
  std::chrono::milliseconds retry{2'000};           ///< A prefix whose lookup failed is not asked again before.
  /// While the directory itself gives no answer, expired listings are used for this long: experts may well be alive.
  std::chrono::milliseconds stale_grace{60'000};
  std::size_t max_entries = 65'536;  ///< Prefixes kept; beyond it those out of use are dropped.
};

/// Prefix listings of one grid with time limits, looked up through a PrefixResolver. Lookups that several threads need
/// are made once. Thread-safe; the resolver's handler only takes a short lock.
class DirectoryCache {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  using Listing = std::shared_ptr<const dht::PrefixListing>;

  enum class State : std::uint8_t {
    kUnknown,  ///< Not asked, or too long ago.
    kKnown,    ///< `listing` holds; it may be empty.
    kFailed,   ///< The directory did not answer a moment ago; will be asked again later.
  };
  struct Entry {
    State state = State::kUnknown;
    Listing listing;       ///< With kKnown.
    TimePoint good_until;  ///< With kKnown and kFailed: when the state becomes kUnknown.
    TimePoint refresh_at;  ///< When it is worth asking again in the background.
  };

  DirectoryCache(std::shared_ptr<dht::PrefixResolver> resolver, DirectoryCacheOptions options);

  Entry find(const ExpertPrefix& prefix, TimePoint now) const;
  /// Coordinates of the prefixes directly below `prefix` that are known to hold something, ascending.
  std::vector<Coordinate> known_below(const ExpertPrefix& prefix, TimePoint now) const;
  /// Changes with every answer.
  std::uint64_t generation() const noexcept { return shared_->generation.load(std::memory_order_acquire); }

  /// Looks up those of `prefixes` that are unknown, in one call of the resolver, and waits until each is known or
  /// failed, or `deadline`. Prefixes that another thread asked for already are waited for, not asked again.
  /// @return the number of prefixes this call asked the resolver for.
  std::size_t fetch(const std::vector<ExpertPrefix>& prefixes, TimePoint deadline);

  /// Asks again for those of `prefixes` whose time for it has come; does not wait. @return as fetch.
  std::size_t refresh(const std::vector<ExpertPrefix>& prefixes, TimePoint now);

  std::uint64_t lookups() const noexcept { return shared_->lookups.load(std::memory_order_relaxed); }

 private:
  struct Slot {
    Listing listing;  // Null until a first answer.
    bool failed = false;
    bool in_flight = false;
    TimePoint good_until;
    TimePoint refresh_at;
  };
  struct Shared {
    mutable std::mutex mutex;
    std::condition_variable answered;
    std::unordered_map<ExpertPrefix, Slot> slots;  // Guarded by mutex.
    std::atomic<std::uint64_t> generation{1};
    std::atomic<std::uint64_t> lookups{0};
    DirectoryCacheOptions options;
  };

  void ask(std::vector<ExpertPrefix> prefixes);
  static void answer(Shared& shared, const std::vector<ExpertPrefix>& prefixes,
                     std::vector<Result<dht::PrefixListing>> results);
  static void accept(const DirectoryCacheOptions& options, Slot& slot, Result<dht::PrefixListing> result,
                     TimePoint now);
  static void make_room(Shared& shared, TimePoint now);

  std::shared_ptr<dht::PrefixResolver> resolver_;
  std::shared_ptr<Shared> shared_;  // Shared: a lookup in flight may outlive the cache.
};

}  // namespace dmoe::gating
