// One connection of a client: dialled on demand, then a link.
#pragma once

#include "net/endpoint.hpp"
#include "net/link.hpp"

#include <boost/asio/basic_waitable_timer.hpp>
#include <boost/asio/ip/basic_resolver.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace dmoe::net {

using StrandTimer = boost::asio::basic_waitable_timer<std::chrono::steady_clock,
                                                      boost::asio::wait_traits<std::chrono::steady_clock>, Strand>;

class Connection;

/// Who owns the connections. Its methods run on their strand.
class ConnectionOwner {
 public:
  virtual ~ConnectionOwner() = default;
  /// The handshake is done; frames queued meanwhile are about to leave.
  virtual void on_open(Connection& connection) = 0;
  virtual void on_replies(Connection& connection, std::shared_ptr<const ReceivedFrame> frame) = 0;
  /// The last event. `dialled`: false when the connection never opened.
  virtual void on_gone(Connection& connection, bool dialled, const Error& why) = 0;
};

/// Methods run on the strand. Dialling: resolve, try each address in turn, upgrade; one time limit for all of it.
class Connection : public Link {
 public:
  Connection(const Strand& strand, Endpoint endpoint, bool bulk, const LinkOptions& options,
             std::chrono::milliseconds connect_timeout, std::weak_ptr<ConnectionOwner> owner);

  void dial();

  const Endpoint& endpoint() const noexcept { return endpoint_; }
  bool bulk() const noexcept { return bulk_; }
  using Link::discard_queued_if;

  std::size_t calls_in_flight = 0;                   ///< Kept by the owner.
  std::chrono::steady_clock::time_point idle_since;  ///< Kept by the owner; when calls_in_flight became 0.

 protected:
  void on_frame(std::shared_ptr<const ReceivedFrame> frame) override;
  void on_closed(const Error& why) override;

 private:
  using Address = boost::asio::ip::tcp::endpoint;

  void resolve();
  void try_next_address();
  void on_connected(boost::system::error_code failure);
  void upgrade();
  void on_upgraded(boost::system::error_code failure);
  void limit_attempt();
  void fail(const std::string& what);
  std::shared_ptr<Connection> self() { return std::static_pointer_cast<Connection>(shared_from_this()); }

  const Endpoint endpoint_;
  const bool bulk_;
  const std::chrono::milliseconds connect_timeout_;
  const std::weak_ptr<ConnectionOwner> owner_;  // Weak: the pool owns its connections.
  boost::asio::ip::basic_resolver<boost::asio::ip::tcp, Strand> resolver_;
  StrandTimer dial_timer_;
  StrandTimer attempt_timer_;
  std::vector<Address> addresses_;
  std::size_t next_address_ = 0;
  std::string last_failure_;
  boost::beast::websocket::response_type response_;
  bool dialled_ = false;
};

}  // namespace dmoe::net
