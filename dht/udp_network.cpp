#include "dht/udp_network.hpp"

#include <boost/asio/ip/address.hpp>
#include <boost/asio/ip/v6_only.hpp>
#include <boost/asio/socket_base.hpp>

#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace dmoe::dht {
namespace {

namespace asio = boost::asio;
using asio::ip::udp;

constexpr int kSocketBuffer = 4 << 20;     // A burst of a few thousand datagrams. The kernel cuts it to its limit.
constexpr std::size_t kMaxQueued = 4'096;  // Datagrams that the socket did not take yet.
constexpr std::size_t kPerCall = 32;
constexpr std::size_t kCallsPerWakeUp = 8;  // Then others on this thread get their turn.

/// Shared by all sockets of a thread: a datagram is used up before the next system call.
struct ReceiveBuffers {
  alignas(8) std::array<std::array<std::uint8_t, kMaxDatagram + 48>, kPerCall> data;
  std::array<sockaddr_storage, kPerCall> sources;
  std::array<iovec, kPerCall> vectors;
  std::array<mmsghdr, kPerCall> headers;

  ReceiveBuffers() {
    for (std::size_t i = 0; i < kPerCall; ++i) {
      vectors[i] = {data[i].data(), data[i].size()};
      headers[i] = {};
      headers[i].msg_hdr.msg_iov = &vectors[i];
      headers[i].msg_hdr.msg_iovlen = 1;
      headers[i].msg_hdr.msg_name = &sources[i];
    }
  }
};

Address address_of(const sockaddr_storage& source) {
  if (source.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(source);
    return Address::v4(ntohl(v4.sin_addr.s_addr), ntohs(v4.sin_port));
  }
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(source);
  Address address;
  std::memcpy(address.ip.data(), &v6.sin6_addr, 16);
  address.port = ntohs(v6.sin6_port);
  return address;
}

socklen_t fill(sockaddr_storage& out, const Address& address, bool v6) {
  std::memset(&out, 0, sizeof out);
  if (!v6) {
    auto& v4 = reinterpret_cast<sockaddr_in&>(out);
    v4.sin_family = AF_INET;
    std::memcpy(&v4.sin_addr, address.ip.data() + 12, 4);
    v4.sin_port = htons(address.port);
    return sizeof(sockaddr_in);
  }
  auto& in6 = reinterpret_cast<sockaddr_in6&>(out);
  in6.sin6_family = AF_INET6;
  std::memcpy(&in6.sin6_addr, address.ip.data(), 16);
  in6.sin6_port = htons(address.port);
  return sizeof(sockaddr_in6);
}

}  // namespace

Result<std::shared_ptr<UdpNetwork>> UdpNetwork::open(const AsioClock::Strand& strand, const net::Endpoint& listen) {
  auto network = std::make_shared<UdpNetwork>(strand);
  if (auto bound = network->bind(listen); !bound.has_value()) return bound.error();
  return network;
}

Result<void> UdpNetwork::bind(const net::Endpoint& listen) {
  boost::system::error_code error;
  const auto ip = asio::ip::make_address(listen.host, error);
  if (error) {
    return Error{Errc::kInvalidArgument,
                 "cannot listen on " + net::to_string(listen) +
                     ": not an IP address of this machine (use 0.0.0.0 or :: for all)",
                 {}};
  }
  v6_ = ip.is_v6();
  takes_v4_ = !v6_ || ip.to_v6().is_unspecified();
  socket_.open(v6_ ? udp::v6() : udp::v4(), error);
  if (!error && v6_) socket_.set_option(asio::ip::v6_only(!takes_v4_), error);
  if (!error) socket_.bind({ip, listen.port}, error);
  if (error == asio::error::address_in_use) {
    return Error{
        Errc::kUnavailable,
        "UDP port " + net::to_string(listen) + " is taken by another process: stop it or choose another port (0: any)",
        {}};
  }
  if (error) {
    return Error{Errc::kUnavailable, "cannot listen on UDP " + net::to_string(listen) + ": " + error.message(), {}};
  }
  socket_.non_blocking(true, error);
  boost::system::error_code ignored;  // Smaller buffers work too.
  socket_.set_option(asio::socket_base::receive_buffer_size(kSocketBuffer), ignored);
  socket_.set_option(asio::socket_base::send_buffer_size(kSocketBuffer), ignored);
  port_ = socket_.local_endpoint(ignored).port();
  return {};
}

void UdpNetwork::start() { wait_readable(); }

void UdpNetwork::stop() {
  receiver_ = {};
  queue_.clear();
  boost::system::error_code ignored;
  socket_.close(ignored);
}

void UdpNetwork::wait_readable() {
  socket_.async_wait(udp::socket::wait_read, [self = shared_from_this()](const boost::system::error_code& error) {
    if (error || !self->socket_.is_open()) return;
    self->drain();
    if (self->socket_.is_open()) self->wait_readable();
  });
}

void UdpNetwork::drain() {
  thread_local ReceiveBuffers buffers;
  for (std::size_t call = 0; call < kCallsPerWakeUp; ++call) {
    for (mmsghdr& header : buffers.headers) header.msg_hdr.msg_namelen = sizeof(sockaddr_storage);
    const int count = ::recvmmsg(socket_.native_handle(), buffers.headers.data(), kPerCall, MSG_DONTWAIT, nullptr);
    if (count <= 0) return;  // Nothing left, or an error that belongs to one datagram.
    for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
      if (!receiver_) return;
      receiver_(address_of(buffers.sources[i]), {buffers.data[i].data(), buffers.headers[i].msg_len});
    }
    if (static_cast<std::size_t>(count) < kPerCall) return;
  }
}

bool UdpNetwork::transmit(const Address& destination, std::span<const std::uint8_t> datagram) {
  sockaddr_storage to;
  const socklen_t size = fill(to, destination, v6_);
  const auto sent = ::sendto(socket_.native_handle(), datagram.data(), datagram.size(), MSG_DONTWAIT | MSG_NOSIGNAL,
                             reinterpret_cast<const sockaddr*>(&to), size);
  // Any other failure is a lost datagram: the protocol repeats or goes elsewhere.
  return sent >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != ENOBUFS);
}

void UdpNetwork::send(const Address& destination, std::span<const std::uint8_t> datagram) {
  if (!socket_.is_open()) return;
  if (destination.is_v4() ? !takes_v4_ : !v6_) return;
  if (queue_.empty() && transmit(destination, datagram)) return;
  if (queue_.size() >= kMaxQueued) return;
  queue_.push_back({destination, {datagram.begin(), datagram.end()}});
  if (queue_.size() == 1) wait_writable();
}

void UdpNetwork::wait_writable() {
  socket_.async_wait(udp::socket::wait_write, [self = shared_from_this()](const boost::system::error_code& error) {
    if (error || !self->socket_.is_open()) return;
    while (!self->queue_.empty() && self->transmit(self->queue_.front().destination, self->queue_.front().datagram)) {
      self->queue_.pop_front();
    }
    if (!self->queue_.empty()) self->wait_writable();
  });
}

}  // namespace dmoe::dht
