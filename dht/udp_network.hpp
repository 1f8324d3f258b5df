// Datagrams over a real UDP socket. Private to dht.
#pragma once

#include "dht/asio_clock.hpp"
#include "dht/environment.hpp"
#include "net/endpoint.hpp"
#include "net/error.hpp"

#include <boost/asio/ip/udp.hpp>

#include <deque>
#include <memory>
#include <vector>

namespace dmoe::dht {

/// One non-blocking socket. Each wake-up drains what has arrived, many datagrams per system call; what the socket does
/// not take at once waits in a bounded queue.
class UdpNetwork final : public DatagramNetwork, public std::enable_shared_from_this<UdpNetwork> {
 public:
  /// kUnavailable: the port is taken, or the address is none of this machine's; the message says which.
  /// @param listen  a literal address; "::" takes IPv4 too.
  static Result<std::shared_ptr<UdpNetwork>> open(const AsioClock::Strand& strand, const net::Endpoint& listen);

  void send(const Address& destination, std::span<const std::uint8_t> datagram) override;
  void on_receive(Receiver receiver) override { receiver_ = std::move(receiver); }

  void start();  ///< Receives from here on. On the strand.
  void stop();   ///< Closes the socket. On the strand.
  std::uint16_t port() const noexcept { return port_; }
  bool takes_v4() const noexcept { return takes_v4_; }
  bool takes_v6() const noexcept { return v6_; }

  explicit UdpNetwork(const AsioClock::Strand& strand) : socket_(strand) {}

 private:
  struct Queued {
    Address destination;
    std::vector<std::uint8_t> datagram;
  };

  Result<void> bind(const net::Endpoint& listen);
  void wait_readable();
  void drain();
  void wait_writable();
  bool transmit(const Address& destination, std::span<const std::uint8_t> datagram);

  boost::asio::ip::udp::socket socket_;
  Receiver receiver_;
  std::deque<Queued> queue_;
  std::uint16_t port_ = 0;
  bool v6_ = false;
  bool takes_v4_ = true;
};

}  // namespace dmoe::dht
