// Claims UIDs, and tells the DHT who is hosted here for as long as it is true.
#pragma once

#include "dht/expert_directory.hpp"
#include "expert_server/expert_host.hpp"
#include "expert_server/reach_check.hpp"
#include "expert_server/uid_claims.hpp"
#include "net/rpc_client.hpp"

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <set>
#include <stop_token>
#include <thread>
#include <vector>

namespace dmoe::expert_server {

struct AnnouncerOptions {
  UidPattern pattern;
  std::size_t num_experts = 0;  ///< 0: all that the pattern names.
  net::Endpoint own;            ///< Where this server reaches itself.
  std::chrono::milliseconds heartbeat{15'000};
  std::chrono::milliseconds ttl{60'000};
  std::uint64_t seed = 0;
};

/// Owns one thread, which waits, looks up and loads experts; no call ever waits for it.
class Announcer {
 public:
  /// All references outlive this.
  Announcer(dht::ExpertDirectory& directory, ReachCheck& reach, ExpertHost& host, net::RpcClient& client,
            net::PeerId self, AnnouncerOptions options);
  ~Announcer();  ///< Ends the thread; withdraws nothing.
  Announcer(const Announcer&) = delete;
  Announcer& operator=(const Announcer&) = delete;

  /// Takes over the experts that have checkpoints here, claims free UIDs for the rest, loads each, calls each through
  /// the own socket, and announces them: once others reach one of the endpoints, or nobody can tell. Then the
  /// heartbeats begin. See Server::start for the errors.
  Result<void> start(const std::stop_token& stop);

  /// Ends the heartbeats and writes tombstones, so that others stop calling at once. Idempotent.
  void withdraw();

 private:
  std::size_t wanted() const;
  std::set<ExpertUid> held() const;
  bool answers(const dht::ServerAddress& server, const ExpertUid& uid);
  Result<void> bring_up(const ExpertUid& uid, const std::stop_token& stop);
  std::set<ExpertUid> restorable(const std::stop_token& stop);
  bool wait_until_reached(const std::stop_token& stop);
  Result<void> announce(const std::stop_token& stop);
  Result<void> tell(std::vector<ExpertUid> uids, const std::stop_token& stop);
  void run(const std::stop_token& stop);
  bool yield_lost(const std::stop_token& stop);
  bool claim_missing(const std::stop_token& stop);
  void report(const Result<void>& announced);

  dht::ExpertDirectory& directory_;
  ReachCheck& reach_;
  ExpertHost& host_;
  net::RpcClient& client_;
  net::PeerId self_;
  AnnouncerOptions options_;
  UidClaims claims_;
  std::set<net::PeerId> unreachable_;     ///< Of the claims under way: not dialled again for each UID.
  std::vector<net::Endpoint> announced_;  ///< Of the last heartbeat.
  bool announcing_fails_ = false;         ///< Said once, not at each heartbeat.
  std::jthread thread_;
};

}  // namespace dmoe::expert_server
