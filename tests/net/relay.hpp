// A TCP proxy as nginx is one for WebSockets: it passes bytes on, and cuts connections that say nothing for a while.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>

namespace dmoe::test {

/// Listens on loopback and passes each connection on to `target`, on a thread of its own; not faster than
/// `bytes_per_second` for each connection and direction, 0: as fast as it can.
class Relay {
 public:
  Relay(std::uint16_t target, std::chrono::milliseconds cut_after, std::uint64_t bytes_per_second = 0);
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  std::uint16_t port() const { return port_; }
  std::size_t connections() const { return connections_; }  ///< So far.
  std::size_t cut() const { return cut_; }                  ///< For silence.
  std::size_t pieces_to_target() const { return pieces_; }  ///< Reads that had bytes for the target.
  std::size_t bytes_to_target() const { return to_target_; }

 private:
  class Pipe;
  void accept();

  boost::asio::io_context io_;
  boost::asio::ip::tcp::acceptor acceptor_;
  const std::uint16_t target_;
  const std::chrono::milliseconds cut_after_;
  const std::uint64_t bytes_per_second_;
  std::uint16_t port_ = 0;
  std::atomic<std::size_t> connections_{0};
  std::atomic<std::size_t> cut_{0};
  std::atomic<std::size_t> pieces_{0};
  std::atomic<std::size_t> to_target_{0};
  std::thread thread_;
};

}  // namespace dmoe::test
