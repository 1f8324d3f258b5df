// Whether nodes that this one never wrote to can reach it. Private to dht.
#pragma once

#include "dht/node_core.hpp"

#include <functional>
#include <memory>

namespace dmoe::dht {

/// Dial-back. A contact has a third node knock here; only a stranger's knock tells anything, since NAT and firewalls
/// let in whoever was written to.
class ReachTest {
 public:
  explicit ReachTest(NodeCore& core) : core_(core) {}

  /// One test at a time: a new one ends the one before with kUnknown.
  void run(std::uint16_t port, std::function<void(Reach)> handler);
  void on_knock(const Address& from, std::uint64_t nonce, std::uint64_t transaction);
  /// This node's address as whoever was asked last sees it.
  const std::optional<Address>& observed() const noexcept { return observed_; }
  /// How many knocks there were in the last test, by what the contacts that were asked say.
  std::size_t knocks() const noexcept { return knocks_; }

 private:
  struct Test {
    std::uint64_t nonce = 0;
    std::size_t asking = 0;            // Contacts that have not said yet whether somebody knocked.
    std::size_t knocks = 0;            // By what they say.
    std::vector<std::uint64_t> known;  // Transactions of those that came through from acquaintances.
    std::function<void(Reach)> handler;
  };

  void ask(const std::shared_ptr<Test>& test, const Contact& contact, std::uint16_t port, bool repeated);
  void on_answer(const std::shared_ptr<Test>& test, bool knocked);
  void settle(const std::shared_ptr<Test>& test, Reach reach);

  NodeCore& core_;
  std::optional<Address> observed_;
  std::size_t knocks_ = 0;
  std::shared_ptr<Test> test_;  // Shared with the requests of the test.
};

/// Makes a node that strangers cannot reach a client, and a full node again once they can. The first test runs before
/// the node joins: later it has written to everybody in a small network. Two failures in a row are needed, each with a
/// third node's word that it knocked; where nothing is known, nothing changes.
class ReachWatch {
 public:
  using OnReach = std::function<void(Reach)>;

  ReachWatch(NodeCore& core, ReachTest& test, OnReach on_reach)
      : core_(core), test_(test), on_reach_(std::move(on_reach)) {}

  /// `decided` runs once, after the first verdict.
  void start(std::function<void()> decided);

 private:
  void look(int failures, int unsure);

  NodeCore& core_;
  ReachTest& test_;
  OnReach on_reach_;
  std::function<void()> decided_;
};

}  // namespace dmoe::dht
