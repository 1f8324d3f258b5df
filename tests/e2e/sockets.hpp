// Plain sockets for tests that misbehave towards a server, or look at what the kernel holds for it.
#pragma once

#include "net/endpoint.hpp"

#include <chrono>
#include <cstdint>
#include <string>

namespace dmoe::test {

/// A TCP connection to a loopback port; closes itself. Throws when it cannot connect.
class TcpConnection {
 public:
  explicit TcpConnection(const net::Endpoint& to);
  ~TcpConnection();
  TcpConnection(const TcpConnection&) = delete;
  TcpConnection& operator=(const TcpConnection&) = delete;

  /// Whether all of it could be sent.
  bool send(const std::string& bytes) const;
  /// What arrives until the other side closes or nothing comes until the deadline. `closed` tells which.
  std::string receive_until_closed(std::chrono::steady_clock::time_point deadline, bool& closed) const;

 private:
  int fd_;
};

/// Holds a loopback port, TCP or UDP, so that nobody else can bind it.
class HeldPort {
 public:
  enum class Kind {
    kTcp,
    kUdp,
    kClosedTcp,  ///< Connections are refused, until `open`.
  };
  explicit HeldPort(Kind kind);
  ~HeldPort();
  HeldPort(const HeldPort&) = delete;
  HeldPort& operator=(const HeldPort&) = delete;
  /// From now on connections to a closed port are taken.
  void open();
  std::uint16_t port() const noexcept { return port_; }
  net::Endpoint endpoint() const { return {"127.0.0.1", port_}; }

 private:
  int fd_;
  std::uint16_t port_ = 0;
};

void send_datagram(const net::Endpoint& to, const std::string& bytes);

/// GET `path`: the body of a reply with status 200, else an empty text.
std::string http_get(const net::Endpoint& from, const std::string& path);

/// Bytes that the kernel received for TCP connections to local port `port` and that the program has not read.
std::uint64_t unread_bytes(std::uint16_t port);

}  // namespace dmoe::test
