// Tells experts and servers that are stuck from those whose answers got lost. Private to dmoe/.
#pragma once

#include "net/expert_uid.hpp"
#include "net/identity.hpp"

#include <chrono>
#include <cstddef>
#include <map>
#include <utility>

namespace dmoe {

/// Where a tenth of all calls is lost, every expert loses one every few passes, and leaving each out for it would leave
/// hardly any. Not thread-safe.
class LostCalls {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  static constexpr std::size_t kLong = 2;   ///< Losses in a row that were waited for long, or …
  static constexpr std::size_t kShort = 6;  ///< … that were not, so that the expert may only have been slower, …
  static constexpr std::chrono::seconds kSpan{1};  ///< … over this long: then it counts as stuck.
  static constexpr std::size_t kSilences = 3;      ///< As kLong, of servers: more is at stake than one expert.
  static constexpr std::size_t kMost = 16'384;     ///< Experts remembered; then the oldest losses are forgotten.

  /// @param uid empty: of the server.
  void answered(const ExpertUid& uid, const net::PeerId& server) { experts_.erase({server, uid}); }

  /// A call was not answered. @param uid empty: no call of the server was. @return whether the expert is stuck.
  bool lost(const ExpertUid& uid, const net::PeerId& server, bool waited_long, TimePoint now) {
    return add(uid, server, waited_long ? kShort / kLong : 1, now);
  }

  /// All calls of one pass to a server, which left as one message, were waited for long and not answered.
  /// @return whether the server is stuck.
  bool silent(const net::PeerId& server, TimePoint now) { return add({}, server, kShort / kSilences, now); }

  std::size_t size() const noexcept { return experts_.size(); }

 private:
  bool add(const ExpertUid& uid, const net::PeerId& server, std::size_t weight, TimePoint now) {
    if (experts_.size() >= kMost) forget_oldest();
    auto& expert = experts_.try_emplace({server, uid}, Losses{now, 0}).first->second;
    expert.count += weight;
    return expert.count >= kShort && now - expert.first >= kSpan;
  }

  struct Losses {
    TimePoint first;
    std::size_t count;  ///< A long one counts as several short ones.
  };

  void forget_oldest() {
    auto oldest = experts_.begin();
    for (auto it = experts_.begin(); it != experts_.end(); ++it) {
      if (it->second.first < oldest->second.first) oldest = it;
    }
    experts_.erase(oldest);
  }

  std::map<std::pair<net::PeerId, ExpertUid>, Losses> experts_;  // Since each one's latest answer.
};

}  // namespace dmoe
