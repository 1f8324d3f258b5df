// A listening port that no error of a single connection, and no lack of file descriptors, ends.
#pragma once

#include "net/endpoint.hpp"
#include "net/error.hpp"
#include "net/link.hpp"

#include <boost/asio/basic_socket_acceptor.hpp>
#include <boost/asio/basic_waitable_timer.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>

namespace dmoe::net {

/// Methods run on the given strand, except listen and start, which come before anything else.
class Acceptor : public std::enable_shared_from_this<Acceptor> {
 public:
  explicit Acceptor(const Strand& strand);

  /// Binds. @return the port, or kUnavailable naming the address and what to do.
  Result<std::uint16_t> listen(const Endpoint& where);
  /// Gives each connection to `on_connection`, with a strand of its own.
  void start(std::function<void(TcpSocket)> on_connection);
  void stop();

 private:
  void accept();
  void on_accept(boost::system::error_code failure, TcpSocket socket);
  void accept_later(const boost::system::error_code& why);

  Strand strand_;
  boost::asio::basic_socket_acceptor<boost::asio::ip::tcp, Strand> acceptor_;
  boost::asio::basic_waitable_timer<std::chrono::steady_clock, boost::asio::wait_traits<std::chrono::steady_clock>,
                                    Strand>
      retry_;
  std::function<void(TcpSocket)> on_connection_;
  std::chrono::steady_clock::time_point last_warning_;
};

}  // namespace dmoe::net
