#include "bench/rpc_floor.hpp"

#include "bench/suite.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <iterator>
#include <limits>
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

/// Memory in huge pages where they help, all of it touched.
class Buffer {
 public:
  explicit Buffer(std::size_t size) : size_(size), mapped_((size + kHugePage - 1) / kHugePage * kHugePage) {
    void* pages = ::mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) fail("mmap");
    (void)::madvise(pages, mapped_, MADV_HUGEPAGE);
    bytes_ = static_cast<char*>(pages);
    std::memset(bytes_, 1, size);
  }
  ~Buffer() { ::munmap(bytes_, mapped_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  char* data() const noexcept { return bytes_; }
  std::size_t size() const noexcept { return size_; }

 private:
  static constexpr std::size_t kHugePage = 2UL * 1024 * 1024;
  std::size_t size_;
  std::size_t mapped_;
  char* bytes_;
};

/// @return false at the end of the stream.
bool read_all(const Socket& socket, const Buffer& bytes, std::size_t piece) {
  for (std::size_t done = 0; done < bytes.size();) {
    const auto got = ::recv(socket.get(), bytes.data() + done, std::min(piece, bytes.size() - done), 0);
    if (got < 0) fail("recv");
    if (got == 0) return false;
    done += static_cast<std::size_t>(got);
  }
  return true;
}

void write_all(const Socket& socket, const Buffer& bytes, std::size_t piece) {
  for (std::size_t done = 0; done < bytes.size();) {
    const auto put = ::send(socket.get(), bytes.data() + done, std::min(piece, bytes.size() - done), MSG_NOSIGNAL);
    if (put < 0) fail("send");
    done += static_cast<std::size_t>(put);
  }
}

/// A peer on its own thread that reads `request` bytes and answers with `reply` bytes, until the connection ends.
class Peer {
 public:
  Peer(std::size_t request, std::size_t reply, std::size_t piece)
      : listener_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) fail("bind");
    if (::listen(listener_.get(), 1) != 0) fail("listen");
    socklen_t size = sizeof(address_);
    if (::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address_), &size) != 0) fail("getsockname");
    thread_ = std::thread([this, request, reply, piece] { serve(request, reply, piece); });
  }
  ~Peer() { thread_.join(); }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  void connect(const Socket& socket) const {
    if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address_), sizeof(address_)) != 0) fail("connect");
    set_no_delay(socket);
  }

 private:
  void serve(std::size_t request, std::size_t reply, std::size_t piece) const {
    const Socket connection(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    set_no_delay(connection);
    const Buffer in(request);
    const Buffer out(reply);
    while (read_all(connection, in, piece)) write_all(connection, out, piece);
  }

  Socket listener_;
  sockaddr_in address_{};
  std::thread thread_;
};

/// Microseconds of each exchange, `in_flight` at a time. TCP keeps the order: the next reply is the oldest message's.
std::vector<double> exchange(std::size_t request, std::size_t reply, std::size_t in_flight, Seconds duration,
                             std::size_t piece = std::numeric_limits<std::size_t>::max()) {
  const Peer peer(request, reply, piece);
  const Socket socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));  // Closed first: that ends the peer's loop.
  peer.connect(socket);
  const Buffer out(request);
  const Buffer in(reply);
  std::vector<double> samples;
  std::deque<Clock::time_point> sent;
  const auto send = [&](Clock::time_point now) {
    sent.push_back(now);
    write_all(socket, out, piece);
  };
  const auto end = Clock::now() + duration;
  for (std::size_t i = 0; i < in_flight; ++i) send(Clock::now());
  while (!sent.empty()) {
    if (!read_all(socket, in, piece)) throw std::runtime_error("the echo ended early");
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

double tcp_stream_gb_per_s(std::size_t bytes, std::size_t piece, Seconds duration) {
  auto samples = exchange(bytes, 1, 1, duration, piece);
  return static_cast<double>(bytes) / (percentile(samples, 0.5) * 1e3);
}

std::size_t best_stream_piece(std::size_t bytes, Seconds duration) {
  const std::size_t pieces[] = {64UL << 10U, 256UL << 10U, 1UL << 20U, bytes};
  std::size_t best = bytes;
  double best_rate = 0;
  for (const auto piece : pieces) {
    const double rate = tcp_stream_gb_per_s(bytes, piece, duration / std::size(pieces));
    if (rate > best_rate) best = piece;
    best_rate = std::max(best_rate, rate);
  }
  return best;
}

}  // namespace dmoe::bench
