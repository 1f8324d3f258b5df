// Answers other nodes' requests. Private to dht.
#pragma once

#include "dht/node_core.hpp"

#include <functional>
#include <map>
#include <unordered_map>

namespace dmoe::dht {

/// Stateless towards the requester but for its cookie. Until an address has echoed one, a reply is never larger than
/// its request.
class Answerer {
 public:
  struct Hooks {
    std::function<void(const NodeId&, const Address&)>
        on_stranger;  ///< Asked us; proven or not, it may be worth knowing.
    std::function<void(const Address&, std::uint64_t nonce, std::uint64_t transaction)>
        on_knock;  ///< A dial-back arrived; a repeated datagram has the same transaction.
  };

  Answerer(NodeCore& core, Hooks hooks) : core_(core), hooks_(std::move(hooks)) {}

  /// @param size  bytes of the request: what the reply to an unproven address may have.
  void on_request(const Address& source, const wire::Message& message, std::size_t size);
  /// Forgets half-received records that got no part lately, and hosts that asked for nothing lately.
  void expire_assemblies();

 private:
  /// A large record whose parts are arriving.
  struct Assembly {
    wire::TravellingRecord travelling;
    std::vector<bool> have;
    std::size_t missing = 0;
    TimePoint touched;
  };
  using AssemblyId = std::tuple<Address, Key, net::PublicKey, std::string, std::uint64_t>;
  /// What one host may make us spend.
  struct Allowance {
    double tokens = 0;
    TimePoint since;
  };

  /// `probed`: what came of a dial-back that was asked for; none: to be asked for.
  void answer(const Address& source, const wire::Message& message, std::size_t size, std::optional<Address> conflict,
              std::optional<wire::Ack> probed = {});
  bool identity_is_elsewhere(const Address& source, const wire::Message& message, std::size_t size);
  void add_proof(const Address& source, const wire::Message& message, wire::Reply& reply);
  bool spend(const Address& source, double cost);
  void forget_full_allowances(TimePoint now);
  bool answer_find(const wire::Find& find, std::size_t room, wire::Reply& reply);
  std::ptrdiff_t add_tags(const Key& key, std::size_t room, TimePoint now, wire::KeyRecords& found);
  std::size_t first_record(const wire::Find& find, std::size_t index, TimePoint now);
  std::size_t add_records(const wire::Find& find, std::size_t index, std::size_t& room, wire::Reply& reply, bool& fits);
  void add_nodes(const std::vector<wire::NodeInfo>& nodes, std::size_t& room, wire::Reply& reply);
  void answer_store(const Address& source, const wire::Store& store, bool trusted, std::size_t room,
                    wire::Reply& reply);
  bool add_copies(const wire::Find& find, std::size_t index, std::size_t& room, wire::Reply& reply);
  void keep_copies(const Address& source, const wire::Store& store);
  wire::Ack keep(const Address& source, const wire::TravellingRecord& travelling);
  wire::Ack take_chunk(const Address& source, const wire::Chunk& chunk, bool trusted);
  void answer_fetch(const wire::Fetch& fetch, std::size_t room, wire::Reply& reply);
  /// `done`: kStored when the third node says that it knocked.
  void ask_for_knock(const Address& source, const wire::Probe& probe, std::function<void(wire::Ack)> done);
  /// Opens a TCP connection to the asker. `done`: kStored, kUnreachable, or kFull when it cannot tell.
  void dial(const Address& source, const wire::Probe& probe, std::function<void(wire::Ack)> done);
  bool may_dial(const Address& source);
  bool knock(const Address& source, const wire::Probe& probe);

  NodeCore& core_;
  Hooks hooks_;
  std::map<AssemblyId, Assembly> assemblies_;
  std::unordered_map<std::uint64_t, Allowance> allowances_;
  std::unordered_map<std::uint64_t, std::size_t> dialled_;  // Hosts, and how often in the minute that …
  TimePoint dialled_since_;                                 // … began then.
  std::size_t dialling_ = 0;
  std::unordered_set<NodeId> challenged_;  // Known ids that turned up elsewhere: the known address is being asked.
  wire::Buffer buffer_;
};

}  // namespace dmoe::dht
