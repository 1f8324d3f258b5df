#include "net/tcp_progress.hpp"

// The kernel's own header: the C library's tcp_info ends before the byte counters, and both cannot be included at once.
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

namespace dmoe::net {

std::optional<TcpProgress> tcp_progress(int socket) noexcept {
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return std::nullopt;
  return TcpProgress{info.tcpi_bytes_received, info.tcpi_bytes_acked};
}

}  // namespace dmoe::net
