#include "bench/rpc_floor.hpp"

#include "bench/suite.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <deque>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

namespace dmoe::bench {
namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

class Socket {
 public:
  explicit Socket(int fd) : fd_(fd) {
    if (fd_ < 0) fail("socket");
  }
  ~Socket() { ::close(fd_); }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  int get() const noexcept { return fd_; }

 private:
  int fd_;
};

void set_no_delay(const Socket& socket) {
  const int on = 1;
  if (::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) != 0) fail("setsockopt");
}

/// @return false at the end of the stream.
bool read_all(const Socket& socket, std::vector<char>& bytes) {
  for (std::size_t done = 0; done < bytes.size();) {
    const auto got = ::recv(socket.get(), bytes.data() + done, bytes.size() - done, 0);
    if (got < 0) fail("recv");
    if (got == 0) return false;
    done += static_cast<std::size_t>(got);
  }
  return true;
}

void write_all(const Socket& socket, const std::vector<char>& bytes) {
  for (std::size_t done = 0; done < bytes.size();) {
    const auto put = ::send(socket.get(), bytes.data() + done, bytes.size() - done, MSG_NOSIGNAL);
    if (put < 0) fail("send");
    done += static_cast<std::size_t>(put);
  }
}

/// A peer on its own thread that reads `request` bytes and answers with `reply` bytes, until the connection ends.
class Peer {
 public:
  Peer(std::size_t request, std::size_t reply) : listener_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) fail("bind");
    if (::listen(listener_.get(), 1) != 0) fail("listen");
    socklen_t size = sizeof(address_);
    if (::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address_), &size) != 0) fail("getsockname");
    thread_ = std::thread([this, request, reply] { serve(request, reply); });
  }
  ~Peer() { thread_.join(); }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  void connect(const Socket& socket) const {
    if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address_), sizeof(address_)) != 0) fail("connect");
    set_no_delay(socket);
  }

 private:
  void serve(std::size_t request, std::size_t reply) const {
    const Socket connection(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    set_no_delay(connection);
    std::vector<char> in(request);
    const std::vector<char> out(reply);
    while (read_all(connection, in)) write_all(connection, out);
  }

  Socket listener_;
  sockaddr_in address_{};
  std::thread thread_;
};

/// Microseconds of each exchange, `in_flight` at a time. TCP keeps the order: the next reply is the oldest message's.
std::vector<double> exchange(std::size_t request, std::size_t reply, std::size_t in_flight, Seconds duration) {
  const Peer peer(request, reply);
  const Socket socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));  // Closed first: that ends the peer's loop.
  peer.connect(socket);
  const std::vector<char> out(request);
  std::vector<char> in(reply);
  std::vector<double> samples;
  std::deque<Clock::time_point> sent;
  const auto send = [&](Clock::time_point now) {
    sent.push_back(now);
    write_all(socket, out);
  };
  const auto end = Clock::now() + duration;
  for (std::size_t i = 0; i < in_flight; ++i) send(Clock::now());
  while (!sent.empty()) {
    if (!read_all(socket, in)) throw std::runtime_error("the echo ended early");
    const auto now = Clock::now();
    samples.push_back(std::chrono::duration<double, std::micro>(now - sent.front()).count());
    sent.pop_front();
    if (now < end || samples.size() < 2) send(now);
  }
  samples.erase(samples.begin());  // It also paid for the first touch of every page.
  return samples;
}

}  // namespace

Latency tcp_echo(std::size_t bytes, std::size_t in_flight, Seconds duration) {
  const auto begin = Clock::now();
  auto samples = exchange(bytes, bytes, in_flight, duration);
  const Seconds taken = Clock::now() - begin;
  return {percentile(samples, 0.5), percentile(samples, 0.99), static_cast<double>(samples.size()) / taken.count()};
}

double tcp_stream_gb_per_s(std::size_t bytes, Seconds duration) {
  auto samples = exchange(bytes, 1, 1, duration);
  return static_cast<double>(bytes) / (percentile(samples, 0.5) * 1e3);
}

}  // namespace dmoe::bench
