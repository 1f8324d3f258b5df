// Experts and servers that failed a moment ago, and are better left alone for a while.
#pragma once

#include "dht/prefix_resolver.hpp"
#include "net/expert_uid.hpp"
#include "net/identity.hpp"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

namespace dmoe::gating {

/// A moment's view of a BanList. Immutable.
class BanView {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  /// Whether `server`, as this record of it says, is to be skipped for `uid`: it or the expert failed under this
  /// announcement or an older one, and the ban has not run out at the time the view was taken.
  bool banned(const ExpertUid& uid, const dht::ServerAddress& server) const;
  bool empty() const noexcept { return servers_.empty() && experts_.empty(); }
  /// When the first ban of this view runs out; time_point::max() when there is none.
  TimePoint first_end() const noexcept { return first_end_; }
  std::uint64_t generation() const noexcept { return generation_; }

 private:
  friend class BanList;
  struct Ban {
    std::uint64_t announced = 0;  ///< Lifted by a record with a larger sequence number.
    TimePoint until;
  };
  std::unordered_map<net::PeerId, Ban> servers_;
  std::map<std::pair<ExpertUid, net::PeerId>, Ban> experts_;
  TimePoint first_end_ = TimePoint::max();
  std::uint64_t generation_ = 0;
};

/// Local knowledge only: nothing of it is told to others, so a mistaken ban costs this trainer alone, for a short time.
/// Ban what failed by its own fault; never for Errc::kInvalidArgument or kCancelled, which are the caller's doing
/// (see `deserves_ban`). Thread-safe. Bounded: beyond kMaxBans the oldest to end are dropped.
class BanList {
 public:
  using TimePoint = BanView::TimePoint;
  static constexpr std::size_t kMaxBans = 16'384;

  /// `ban_time`: how long a ban lasts unless a newer announcement lifts it.
  explicit BanList(std::chrono::milliseconds ban_time = std::chrono::seconds(15)) : ban_time_(ban_time) {}

  /// @param time instead of ban_time: what an overloaded expert asked for.
  void ban_expert(const ExpertUid& uid, const dht::ServerAddress& server, TimePoint now,
                  std::optional<std::chrono::milliseconds> time = {});
  void ban_server(const dht::ServerAddress& server, TimePoint now);
  void lift_server(const net::PeerId& peer);   ///< Bans of single experts of it stay.
  void lift_experts(const net::PeerId& peer);  ///< All that were banned one by one.

  /// The bans that hold at `now`. Cheap when nothing changed since the last call.
  std::shared_ptr<const BanView> view(TimePoint now);
  /// Changes with every ban and lift.
  std::uint64_t generation() const noexcept { return generation_.load(std::memory_order_acquire); }
  std::chrono::milliseconds ban_time() const noexcept { return ban_time_; }

 private:
  void changed();

  const std::chrono::milliseconds ban_time_;
  std::atomic<std::uint64_t> generation_{1};
  std::mutex mutex_;
  BanView bans_;                         // Guarded by mutex_.
  std::shared_ptr<const BanView> view_;  // Guarded by mutex_; null when bans_ changed since. Shared with its readers.
};

/// Whether a failure with `code` speaks against the expert or its server, and not against the caller.
bool deserves_ban(Errc code) noexcept;

}  // namespace dmoe::gating
