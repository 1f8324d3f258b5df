// Requests in flight: matching, patience, repeats, pacing.
#pragma once

#include "dht/peer_book.hpp"
#include "dht/wire.hpp"

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <queue>
#include <unordered_map>

namespace dmoe::dht {

/// One request to one node, and whom to tell.
struct Request {
  Address to;
  std::optional<NodeId> expected;  ///< Whose key must answer; none: whoever is there.
  std::variant<wire::Ping, wire::Find, wire::Store, wire::Chunk, wire::Fetch, wire::Probe> body;
  int repeats = 1;           ///< Datagrams sent again while it stays unanswered.
  bool fresh_proof = false;  ///< Ask for a proof even when one was given before.
  /// The answer takes as long as what is asked for, up to this: it tells nothing about the round trip. 0: it does.
  Duration takes{};

  /// Exactly one of these two, once. A reply comes from the right address, transaction and key (proven, if it had not
  /// been before).
  std::function<void(const wire::Message& message, const wire::Reply& reply)> on_reply;
  std::function<void()> on_failure;
  std::function<void()> on_slow;  ///< May come once before either: older than this peer's usual round trip.
};

/// Sends requests and matches replies. A request older than its peer's usual round trip is reported as slow and
/// repeated, and its answer is still welcome until it fails at some four times that. Only so many requests that are not
/// slow are in flight; others queue, so that a burst of ours does not overrun our own or others' socket buffers.
class Requests {
 public:
  struct Hooks {
    std::function<void(const NodeId&, const Address&)> on_proven;  ///< It signed our nonce at this address.
    std::function<void(const NodeId&, const Address&)> on_heard;   ///< It answered.
    std::function<void(const NodeId&, const Address&)> on_failed;
    std::function<void(const NodeId&, const Address&)>
        on_client;                                              ///< It answered that it is a client (after on_heard).
    std::function<void(const Address& elsewhere)> on_conflict;  ///< Our identity is in use there.
  };

  Requests(DatagramNetwork& network, Clock& clock, RandomSource& random, const Signer& signer, PeerBook& book,
           bool client, Hooks hooks);
  ~Requests();

  void start(Request request);
  /// @return whether the reply belonged to a request in flight.
  bool on_reply(const Address& source, const wire::Message& message, wire::Reply& reply);
  /// Whether a transaction is one of ours: our own datagram came back.
  bool is_ours(std::uint64_t transaction) const { return in_flight_.contains(transaction); }
  /// Drops every request without telling anybody.
  void stop();

  /// The node became or ceased to be a client.
  void set_client(bool client) noexcept { client_ = client; }
  std::uint64_t sent() const noexcept { return sent_; }
  std::size_t in_flight() const noexcept { return in_flight_.size(); }

 private:
  struct Flight {
    Request request;
    TimePoint first_sent;
    TimePoint last_sent;
    Duration patience{};
    TimePoint fails;
    int repeats_done = 0;
    bool proving = false;
    bool slow = false;
  };
  struct Wake {
    TimePoint when;
    std::uint64_t transaction;
    friend bool operator>(const Wake& a, const Wake& b) { return a.when > b.when; }
  };

  bool is_spared(const Request& request);
  void launch(Request request);
  void transmit(std::uint64_t transaction, Flight& flight);
  void wake_at(TimePoint when, std::uint64_t transaction);
  void arm();
  void on_timer();
  void forgive(Duration late);
  void look_at(std::uint64_t transaction);
  void leave_window(Flight& flight);
  void fail(std::uint64_t transaction);
  bool proof_holds(const wire::Message& message, const wire::Reply& reply) const;

  std::size_t window() const noexcept;

  DatagramNetwork& network_;
  Clock& clock_;
  RandomSource& random_;
  const Signer& signer_;
  PeerBook& book_;
  bool client_;
  Hooks hooks_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Flight>> in_flight_;  // By transaction.
  std::deque<Request> waiting_;
  std::size_t in_window_ = 0;
  std::priority_queue<Wake, std::vector<Wake>, std::greater<>> wakes_;
  std::optional<TimePoint> armed_;
  TimerId timer_ = 0;
  wire::Buffer buffer_;
  std::uint64_t sent_ = 0;
  bool stopped_ = false;
  std::shared_ptr<const bool> alive_ = std::make_shared<const bool>(true);  // Posted failures watch it.
};

}  // namespace dmoe::dht
