// How expert UIDs are written into the DHT. DESIGN.md §6, "ExpertDirectory".
#pragma once

#include "dht/prefix_resolver.hpp"

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

namespace dmoe::dht {

class Node;

inline constexpr std::chrono::seconds kHeartbeatPeriod{15};  ///< A server re-announces all its experts this often.
inline constexpr std::chrono::seconds kAnnouncementTtl{60};  ///< Without a newer heartbeat an expert counts as gone.

/// What a store of many records came to.
struct AnnounceReport {
  std::size_t records = 0;         ///< One per prefix touched, not per expert.
  std::size_t stored = 0;          ///< Acknowledged by at least one holder (or held here, when this node is alone).
  std::size_t replicas_least = 0;  ///< Holders of the worst-replicated record.
};

/// Under the key of each UID prefix lies one record per server (subkey: its peer ID): the child coordinates it hosts
/// and its endpoints. A heartbeat costs O(prefixes touched). Thread-safe: calls are handed to the node's strand, and
/// handlers run there; they must not block.
class ExpertDirectory final : public PrefixResolver {
 public:
  /// `node` outlives the directory.
  explicit ExpertDirectory(Node& node);
  ~ExpertDirectory() override;

  /// Publishes that this node's identity hosts `uids` at `endpoints`. Replaces what it announced before under the
  /// same prefixes; prefixes that are no longer touched are withdrawn. kInvalidArgument: no endpoints, or a listing
  /// that does not fit a record (64 KiB).
  void announce(std::vector<ExpertUid> uids, std::vector<net::Endpoint> endpoints, std::chrono::milliseconds ttl,
                std::function<void(Result<AnnounceReport>)> handler);

  /// Writes tombstones for every prefix announced before: readers stop seeing the experts at once.
  void withdraw_all(std::function<void(Result<AnnounceReport>)> handler);

  void list(std::vector<ExpertPrefix> prefixes, std::chrono::steady_clock::time_point deadline,
            Handler handler) override;

  /// Who hosts each of `uids`, through their parent prefixes; an empty list for one that nobody does.
  void resolve(std::vector<ExpertUid> uids, std::chrono::steady_clock::time_point deadline,
               std::function<void(Result<std::vector<std::vector<std::shared_ptr<const ServerAddress>>>>)> handler);

  /// Every live expert of `grid` with `dimensions` dimensions, by a walk from the root prefix.
  void list_grid(
      std::string grid, std::size_t dimensions, std::chrono::steady_clock::time_point deadline,
      std::function<void(Result<std::map<ExpertUid, std::vector<std::shared_ptr<const ServerAddress>>>>)> handler);

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;  // Shared: lookups in flight outlive this object.
};

}  // namespace dmoe::dht
