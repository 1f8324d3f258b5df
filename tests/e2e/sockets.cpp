#include "tests/e2e/sockets.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <system_error>

namespace dmoe::test {
namespace {

int open_socket(int type) {
  const int fd = socket(AF_INET, type | SOCK_CLOEXEC, 0);
  if (fd < 0) throw std::system_error(errno, std::generic_category(), "socket");
  return fd;
}

sockaddr_in address_of(const net::Endpoint& endpoint) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(endpoint.port);
  if (inet_pton(AF_INET, endpoint.host.c_str(), &address.sin_addr) != 1) {
    throw std::runtime_error("not an IPv4 address: " + endpoint.host);
  }
  return address;
}

const sockaddr* generic(const sockaddr_in& address) { return reinterpret_cast<const sockaddr*>(&address); }

}  // namespace

TcpConnection::TcpConnection(const net::Endpoint& to) : fd_(open_socket(SOCK_STREAM)) {
  const sockaddr_in address = address_of(to);
  if (connect(fd_, generic(address), sizeof(address)) != 0) {
    const int number = errno;
    close(fd_);
    throw std::system_error(number, std::generic_category(), "connect to " + to_string(to));
  }
}

TcpConnection::~TcpConnection() { close(fd_); }

bool TcpConnection::send(const std::string& bytes) const {
  std::size_t sent = 0;
  while (sent < bytes.size()) {
    const ssize_t count = ::send(fd_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (count <= 0) return false;
    sent += static_cast<std::size_t>(count);
  }
  return true;
}

std::string TcpConnection::receive_until_closed(std::chrono::steady_clock::time_point deadline, bool& closed) const {
  std::string received;
  closed = false;
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    pollfd entry{fd_, POLLIN, 0};
    if (poll(&entry, 1, static_cast<int>(std::max<std::int64_t>(0, left.count()))) <= 0) return received;
    std::array<char, 4'096> bytes{};
    const ssize_t count = recv(fd_, bytes.data(), bytes.size(), 0);
    closed = count <= 0;
    if (closed) return received;
    received.append(bytes.data(), static_cast<std::size_t>(count));
  }
}

HeldPort::HeldPort(Kind kind) : fd_(open_socket(kind == Kind::kUdp ? SOCK_DGRAM : SOCK_STREAM)) {
  sockaddr_in address = address_of({"127.0.0.1", 0});
  socklen_t size = sizeof(address);
  const bool held = bind(fd_, generic(address), size) == 0 && (kind != Kind::kTcp || listen(fd_, 1) == 0) &&
                    getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &size) == 0;
  if (!held) throw std::system_error(errno, std::generic_category(), "hold a port");
  port_ = ntohs(address.sin_port);
}

HeldPort::~HeldPort() { close(fd_); }

void HeldPort::open() {
  if (listen(fd_, SOMAXCONN) != 0) throw std::system_error(errno, std::generic_category(), "open a port");
}

void send_datagram(const net::Endpoint& to, const std::string& bytes) {
  const int fd = open_socket(SOCK_DGRAM);
  const sockaddr_in address = address_of(to);
  (void)sendto(fd, bytes.data(), bytes.size(), 0, generic(address), sizeof(address));
  close(fd);
}

std::string http_get(const net::Endpoint& from, const std::string& path) {
  const TcpConnection connection(from);
  connection.send("GET " + path + " HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n");
  bool closed = false;
  const std::string reply =
      connection.receive_until_closed(std::chrono::steady_clock::now() + std::chrono::seconds(60), closed);
  const std::size_t body = reply.find("\r\n\r\n");
  if (!reply.starts_with("HTTP/1.1 200") || body == std::string::npos) return {};
  return reply.substr(body + 4);
}

std::uint64_t unread_bytes(std::uint16_t port) {
  // Lines of /proc/net/tcp: "sl local_address rem_address st tx_queue:rx_queue …", numbers in hexadecimal.
  std::ifstream table("/proc/net/tcp");
  std::string line;
  std::getline(table, line);
  std::uint64_t total = 0;
  while (std::getline(table, line)) {
    std::istringstream fields(line);
    std::string number;
    std::string local;
    std::string remote;
    std::string state;
    std::string queues;
    fields >> number >> local >> remote >> state >> queues;
    constexpr const char* kEstablished = "01";
    if (state != kEstablished || std::stoul(local.substr(local.find(':') + 1), nullptr, 16) != port) continue;
    total += std::stoull(queues.substr(queues.find(':') + 1), nullptr, 16);
  }
  return total;
}

}  // namespace dmoe::test
