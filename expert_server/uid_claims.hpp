// Which UIDs of a pattern this server may host: those that no other live server does.
#pragma once

#include "dht/prefix_resolver.hpp"
#include "net/endpoint.hpp"
#include "net/error.hpp"
#include "net/expert_uid.hpp"
#include "net/identity.hpp"

#include <chrono>
#include <cstdint>
#include <functional>
#include <random>
#include <set>
#include <stop_token>
#include <vector>

namespace dmoe::expert_server {

/// Whether the server at these endpoints really answers for the expert: the DHT may name one that died.
using LiveCheck = std::function<bool(const dht::ServerAddress& server, const ExpertUid& uid)>;

/// Blocks in DHT lookups; used by one thread at a time, not an io thread.
class UidClaims {
 public:
  /// `directory` and what `is_live` uses outlive this.
  UidClaims(dht::PrefixResolver& directory, LiveCheck is_live, net::PeerId self, UidPattern pattern,
            std::uint64_t seed);

  /// Up to `count` UIDs of the pattern that are not in `held` and that no other server holds: at random, or in order
  /// when all of the pattern is wanted. `verify`: a holder that the DHT names counts only if it answers.
  std::vector<ExpertUid> free_uids(std::size_t count, const std::set<ExpertUid>& held, bool verify,
                                   const std::stop_token& stop);

  struct Lost {
    ExpertUid uid;
    net::PeerId owner;
  };
  /// Those of `held` that another live server announces too and owns: of all its claimants the one with the smallest
  /// peer ID keeps a UID.
  std::vector<Lost> lost_uids(const std::set<ExpertUid>& held, const std::stop_token& stop);

 private:
  std::vector<ExpertUid> draw(std::size_t count, const std::set<ExpertUid>& held, std::set<ExpertUid>& seen);
  std::map<ExpertPrefix, dht::PrefixListing> list_parents(const std::vector<ExpertUid>& uids,
                                                          const std::stop_token& stop);

  dht::PrefixResolver& directory_;
  LiveCheck is_live_;
  net::PeerId self_;
  UidPattern pattern_;
  std::mt19937_64 random_;
};

}  // namespace dmoe::expert_server
