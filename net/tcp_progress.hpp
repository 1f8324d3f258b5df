// What the kernel knows about a connection's progress, without a look at each read and write.
#pragma once

#include <cstdint>
#include <optional>

namespace dmoe::net {

struct TcpProgress {
  std::uint64_t received = 0;      ///< Bytes that arrived in order.
  std::uint64_t acknowledged = 0;  ///< Bytes of ours that the peer's kernel has.

  friend bool operator==(const TcpProgress&, const TcpProgress&) = default;
};

/// Nothing when the socket is closed.
std::optional<TcpProgress> tcp_progress(int socket) noexcept;

}  // namespace dmoe::net
