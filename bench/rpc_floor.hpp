// What the machine's own sockets can do: the floor that calls are measured against.
#pragma once

#include <chrono>
#include <cstddef>

namespace dmoe::bench {

using Seconds = std::chrono::duration<double>;

struct Latency {
  double p50_us = 0;
  double p99_us = 0;
  double messages_per_s = 0;
};

/// Round trips of `bytes` each way over a loopback TCP connection between two threads with blocking reads. `in_flight`
/// messages are on their way at a time: each reply is followed by the next message.
Latency tcp_echo(std::size_t bytes, std::size_t in_flight, Seconds duration);

/// Bytes a system call with which messages of `bytes` travel fastest here: from 64 KiB to the whole message.
std::size_t best_stream_piece(std::size_t bytes, Seconds duration);

/// Bytes per second, in 1e9, of messages of `bytes` one way, in huge pages, `piece` bytes a system call; each is
/// acknowledged by one byte, as a call is by its reply.
double tcp_stream_gb_per_s(std::size_t bytes, std::size_t piece, Seconds duration);

}  // namespace dmoe::bench
