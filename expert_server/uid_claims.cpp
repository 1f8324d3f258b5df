#include "expert_server/uid_claims.hpp"

#include "expert_server/arrival.hpp"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <map>
#include <utility>

namespace dmoe::expert_server {
namespace {

constexpr std::chrono::milliseconds kListTimeout{5'000};
constexpr std::size_t kLeastDrawn = 64;  ///< UIDs looked up together; more at once would flood the DHT.
constexpr std::size_t kMostDrawn = 4'096;

using Listings = std::map<ExpertPrefix, dht::PrefixListing>;

const dht::PrefixListing::Child* child_of(const Listings& listings, const ExpertUid& uid) {
  const auto listing = listings.find(uid.parent());
  if (listing == listings.end()) return nullptr;
  const auto& children = listing->second.children;
  const auto found = std::lower_bound(children.begin(), children.end(), uid.coordinates.back(),
                                      [](const auto& child, Coordinate wanted) { return child.coordinate < wanted; });
  return found != children.end() && found->coordinate == uid.coordinates.back() ? &*found : nullptr;
}

}  // namespace

UidClaims::UidClaims(dht::PrefixResolver& directory, LiveCheck is_live, net::PeerId self, UidPattern pattern,
                     std::uint64_t seed)
    : directory_(directory), is_live_(std::move(is_live)), self_(self), pattern_(std::move(pattern)), random_(seed) {}

std::vector<ExpertUid> UidClaims::draw(std::size_t count, const std::set<ExpertUid>& held, std::set<ExpertUid>& seen) {
  std::vector<ExpertUid> drawn;
  const auto size = pattern_.size();
  const auto take = [&](std::uint64_t index) {
    auto uid = pattern_.at(index);
    if (!held.contains(uid) && seen.insert(uid).second) drawn.push_back(std::move(uid));
  };
  if (count >= size) {
    for (std::uint64_t index = 0; index < size; ++index) take(index);
    return drawn;
  }
  // With few left unseen most draws repeat: a bounded number of them, then a scan from a random place.
  std::uniform_int_distribution<std::uint64_t> any(0, size - 1);
  for (std::size_t tries = 0; drawn.size() < count && tries < 8 * count; ++tries) take(any(random_));
  if (drawn.empty() && seen.size() < size) {
    const auto first = any(random_);
    for (std::uint64_t step = 0; step < size && drawn.size() < count; ++step) take((first + step) % size);
  }
  return drawn;
}

Listings UidClaims::list_parents(const std::vector<ExpertUid>& uids, const std::stop_token& stop) {
  std::set<ExpertPrefix> unique;
  for (const auto& uid : uids) unique.insert(uid.parent());
  std::vector<ExpertPrefix> prefixes(unique.begin(), unique.end());
  const auto answer = Arrival<std::vector<Result<dht::PrefixListing>>>::make();
  directory_.list(prefixes, std::chrono::steady_clock::now() + kListTimeout,
                  [answer](std::vector<Result<dht::PrefixListing>> found) { answer->set(std::move(found)); });
  const auto found = answer->wait(kListTimeout + std::chrono::seconds{1}, stop);
  Listings listings;
  if (!found) return listings;
  for (std::size_t i = 0; i < found->size() && i < prefixes.size(); ++i) {
    // Not known to be taken is taken as free: a clash shows up in the next lost_uids.
    if ((*found)[i]) listings.emplace(prefixes[i], *(*found)[i]);
  }
  return listings;
}

std::vector<ExpertUid> UidClaims::free_uids(std::size_t count, const std::set<ExpertUid>& held, bool verify,
                                            const std::stop_token& stop) {
  std::vector<ExpertUid> free;
  std::set<ExpertUid> seen;
  const bool all = count + held.size() >= pattern_.size();
  const auto taken = [&](const Listings& listings, const ExpertUid& uid) {
    const auto* child = child_of(listings, uid);
    return child != nullptr && std::any_of(child->servers.begin(), child->servers.end(), [&](const auto& server) {
             return server->peer != self_ && (!verify || is_live_(*server, uid));
           });
  };
  while (free.size() < count && !stop.stop_requested()) {
    const auto wanted = std::clamp(2 * (count - free.size()), kLeastDrawn, kMostDrawn);
    const auto drawn = draw(all ? static_cast<std::size_t>(pattern_.size()) : wanted, held, seen);
    if (drawn.empty()) break;
    const auto listings = list_parents(drawn, stop);
    for (const auto& uid : drawn) {
      if (free.size() == count) break;
      if (!taken(listings, uid)) free.push_back(uid);
    }
  }
  return free;
}

std::vector<UidClaims::Lost> UidClaims::lost_uids(const std::set<ExpertUid>& held, const std::stop_token& stop) {
  std::vector<Lost> lost;
  const auto listings = list_parents({held.begin(), held.end()}, stop);
  for (const auto& uid : held) {
    const auto* child = child_of(listings, uid);
    if (child == nullptr) continue;
    for (const auto& server : child->servers) {
      if (!(server->peer < self_)) continue;
      if (!is_live_(*server, uid)) continue;
      lost.push_back({uid, server->peer});
      break;
    }
  }
  return lost;
}

}  // namespace dmoe::expert_server
