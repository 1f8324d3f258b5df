// A Kademlia node without I/O: sockets, threads, disks and time are handed to it.
#pragma once

#include "dht/environment.hpp"
#include "dht/record.hpp"
#include "dht/record_store.hpp"
#include "dht/wire.hpp"
#include "net/error.hpp"

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace dmoe::dht {

struct NodeOptions {
  bool client_only = false;  ///< Neither stores records nor enters other nodes' tables.
  /// Find out whether strangers reach this node before it joins, and every ten minutes: while they do not, it acts as a
  /// client.
  bool detect_reach = false;
  /// Of how many finds one leaves a copy on its path, at least 1: a key in demand has one soon, others cost nothing.
  std::uint32_t copy_one_in = 4;
  bool limit_subnets = true;                    ///< At most 4 global addresses of one /24 or /48 in a bucket.
  std::chrono::milliseconds max_ttl = kMaxTtl;  ///< Longer lifetimes are clipped to this.
  std::chrono::milliseconds bootstrap_period{
      2'000};  ///< First pause between attempts to reach an initial peer; doubles …
  std::chrono::milliseconds bootstrap_max{15'000};  ///< … to this, with jitter, and never ends.
};

/// A value to be published under the node's own key.
struct StoreRequest {
  Key key;
  std::string subkey;               ///< At most 64 bytes. Empty: the publisher's peer ID.
  std::vector<std::uint8_t> value;  ///< At most 64 KiB.
  std::chrono::milliseconds ttl{60'000};
  bool tombstone = false;  ///< Withdraws what lies there; the value is empty then.
  bool keep = false;       ///< Publish anew at a third of its life, until it is replaced or withdrawn.
};

struct StoreReport {
  std::size_t replicas = 0;  ///< Holders that acknowledged, this node included when it is one.
  std::uint64_t sequence = 0;
};

struct FindOptions {
  /// Holders whose records are merged before the search ends. 1: the first valid answer; 0: all that the 8 nearest
  /// have.
  std::size_t quorum = 1;
  /// Of a larger quorum, so many will do when the others are late: once so many gave records, the rest has a quarter
  /// of a usual round trip left. 0: all are waited for.
  std::size_t enough = 0;
  /// With a quorum of 1, a copy that an earlier search left on the path will do: up to a minute old, it may miss newer
  /// records and withdrawals.
  bool allow_cached = true;
  std::optional<TimePoint> deadline;
};

struct FindResult {
  std::vector<LiveRecord> records;  ///< Verified and alive; newest per publisher and subkey; no tombstones.
  std::size_t holders = 0;          ///< Nodes that gave them.
  std::size_t requests = 0;         ///< Datagrams asked for by the whole walk, when this key ended.
  bool cached = false;              ///< From such a copy.
};

struct PingReport {
  NodeId id;
  Duration round_trip;
  std::optional<Address> observed;  ///< This node's address as the other sees it.
};

struct NodeStats {
  std::size_t known_nodes = 0;
  std::size_t in_flight = 0;
  StoreStats store;
  std::size_t cached_keys = 0;  ///< Of which this node keeps copies for searches on their way.
  std::uint64_t datagrams_sent = 0;
  std::uint64_t datagrams_received = 0;
  std::uint64_t datagrams_refused = 0;  ///< Malformed, over a limit, unasked for, or with a bad signature.
  std::uint64_t signatures_checked = 0;
};

/// How far a node is in the network.
enum class Reach {
  kUnknown,      ///< Not tested, nobody to test it with, or only nodes came through that had been written to.
  kReachable,    ///< A node that we had not contacted got a datagram through.
  kUnreachable,  ///< It did not: this node acts as a client.
};

/// What other nodes say about a TCP port of this host: the addresses that they see it at, with that port.
struct DialReport {
  std::vector<Address> reached;    ///< Somebody connected there.
  std::vector<Address> unreached;  ///< Whoever tried could not. Neither: nobody could tell.
};

/// One node of the DHT. Every method runs on the clock's strand (asserted) unless it says otherwise; handlers run there
/// too, exactly once, never inside the call that took them, and not at all once the node is destroyed.
class Node {
 public:
  /// Everything handed over outlives the node. It neither sends nor joins before `bootstrap` or a lookup.
  Node(DatagramNetwork& network, Clock& clock, RandomSource random, RecordStore& store, const Signer& signer,
       NodeOptions options = {});
  ~Node();
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  const NodeId& id() const noexcept;  ///< Thread-safe.
  Clock& clock() const noexcept;      ///< Thread-safe.

  /// Publishes under this node's key. Requests made in one turn, or while others are on their way, share a signature
  /// and datagrams. kInvalidArgument: over a limit. kUnavailable: nobody took it; kOverloaded: all were full.
  void store_many(std::vector<StoreRequest> requests, std::function<void(std::vector<Result<StoreReport>>)> handler);
  void store(StoreRequest request, std::function<void(Result<StoreReport>)> handler);
  /// Replaces the own record by a tombstone that lives for `ttl`: at least what the record had left.
  void withdraw(Key key, std::string subkey, std::chrono::milliseconds ttl,
                std::function<void(Result<StoreReport>)> handler);

  /// One result per key, in order; all keys share one walk. A key without live records is an empty result.
  /// kDeadlineExceeded: no record and the walk did not end in time. kUnavailable: a client without a single contact.
  void find_many(std::vector<Key> keys, FindOptions options,
                 std::function<void(std::vector<Result<FindResult>>)> handler);
  void find(Key key, FindOptions options, std::function<void(Result<FindResult>)> handler);

  /// Who is there? kDeadlineExceeded: nobody answered.
  void ping(const Address& address, std::function<void(Result<PingReport>)> handler);
  /// The 8 nearest nodes to `target` that answer.
  void nearest(const Bits& target, std::function<void(std::vector<wire::NodeInfo>)> handler);

  /// Joins through `peers`, now and whenever contact is lost; keeps trying. Call again when names resolve anew: the new
  /// list replaces the old. `on_contact` runs at the first answer; `on_conflict` when this identity turns out to be in
  /// use at another address (that one keeps it). Both may be empty.
  void bootstrap(std::vector<Address> peers, std::function<void()> on_contact,
                 std::function<void(const Address&)> on_conflict);

  /// From now on a client, or a full node again. A node that becomes a client hands its records to others.
  void set_client(bool client);
  bool is_client() const;
  /// With `detect_reach`: runs when this node became a client (kUnreachable) or a full node again (kReachable).
  /// `observed`: this node's address as others see it, where one said so.
  void on_reach(std::function<void(Reach, const std::optional<Address>& observed)> handler);

  /// Asks others to reach this node at its observed address with the given port (0: as observed).
  void test_reach(std::uint16_t port, std::function<void(Reach)> handler);

  /// Opens TCP connections for others who call `test_dial`; outlives the node. Without one this node cannot tell.
  void set_dialler(Dialler* dialler);
  /// Asks up to three nodes of each address family to open a TCP connection to `port` at the address that this node
  /// wrote to them from; they dial no other.
  void test_dial(std::uint16_t port, std::function<void(DialReport)> handler);

  /// Ends everything in flight: its handlers get kCancelled, or what there was. Later calls get kCancelled. The store
  /// is not touched afterwards. Idempotent.
  void stop();

  NodeStats stats() const;
  /// Proven nodes in the table now.
  std::vector<wire::NodeInfo> known_nodes() const;
  /// Writes the routing table to the store, for the next start. Also done every minute.
  void save_table();

  class Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace dmoe::dht
