// From the names of initial peers to a joined node. Private to dht.
#pragma once

#include "dht/name_resolver.hpp"
#include "dht/node.hpp"

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace dmoe::dht {

/// Resolves names (again at every attempt: their addresses change), hands all addresses to the node, and tells once how
/// the first contact went. On the strand.
class Bootstrap : public std::enable_shared_from_this<Bootstrap> {
 public:
  /// Which addresses the socket can reach.
  struct Accepts {
    bool v4 = true;
    bool v6 = true;
  };
  using Handler = std::function<void(Result<void>)>;

  Bootstrap(Node& node, std::shared_ptr<Clock> clock, Resolve resolve, Accepts accepts,
            std::vector<net::Endpoint> peers, std::chrono::milliseconds timeout);

  void start(Handler handler);
  /// Calls a waiting handler with kCancelled; nothing runs afterwards.
  void stop();

 private:
  void resolve_all();
  void on_resolved(const net::Endpoint& peer, const Result<std::vector<Address>>& found);
  void take(const net::Endpoint& peer, const Address& address);
  void one_less();
  void on_timeout();
  void join_through(std::vector<Address> peers);
  void on_contact();
  void on_conflict(const Address& elsewhere);
  void finish(Result<void> result);
  std::string reasons() const;

  Node& node_;
  std::shared_ptr<Clock> clock_;
  Resolve resolve_;
  Accepts accepts_;
  std::vector<net::Endpoint> peers_;
  std::chrono::milliseconds timeout_;
  Handler handler_;
  std::vector<Address> addresses_;                // Of this round.
  std::map<net::Endpoint, std::string> reasons_;  // Why a peer is not in contact, for the error.
  std::size_t resolving_ = 0;
  Duration pause_;
  bool contacted_ = false;
  bool alone_ = false;  // Nobody answered in time; the node is not waiting for anybody.
  bool conflict_told_ = false;
  bool stopped_ = false;
};

}  // namespace dmoe::dht
