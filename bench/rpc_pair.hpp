// A server and clients on threads of their own, for suites that measure calls without torch.
#pragma once

#include "net/metrics.hpp"
#include "net/rpc_client.hpp"
#include "net/rpc_server.hpp"
#include "testbed/io_threads.hpp"

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <semaphore>
#include <string>
#include <thread>
#include <vector>

namespace dmoe::bench {

using Seconds = std::chrono::duration<double>;

using testbed::IoThreads;

using Payload = std::shared_ptr<const std::vector<std::uint64_t>>;
Payload payload_of(std::size_t bytes);

struct RpcPairOptions {
  std::size_t clients = 1;     ///< Each with a connection of its own.
  int threads = 1;             ///< Of the server's io_context, and of the clients'.
  std::size_t bulk_bytes = 0;  ///< What the server's "source" answers with.
  std::string address = "127.0.0.1";
  std::chrono::milliseconds idle_timeout{120'000};  ///< Of the server's connections.
  std::chrono::milliseconds patience{30'000};       ///< Of each call.
  bool count_connections = false;                   ///< For `server_connections`.
  /// Called before the threads and sockets of either side are made.
  std::function<void()> before_server = {};
  std::function<void()> before_clients = {};
};

/// The server answers by uid: "echo" with the input, "sink" with nothing, "source" with `bulk_bytes`.
class RpcPair {
 public:
  explicit RpcPair(const RpcPairOptions& options = {});

  using OnReply = std::function<void(Result<net::IncomingReply>)>;
  /// `payload` may be null: a call without input.
  void start(std::size_t client, const char* uid, const Payload& payload, OnReply on_reply);
  /// The caller blocks until its reply, as a training thread does. Throws what the call failed with.
  void call_and_wait(std::size_t client, const char* uid, const Payload& payload);

  std::uint16_t port() const { return server_->port(); }
  std::size_t server_connections();  ///< Open ones, if they are counted.
  std::size_t clients() const noexcept { return clients_.size(); }
  const Payload& bulk() const noexcept { return bulk_; }

 private:
  const net::Endpoint address_;  ///< Without its port.
  const std::chrono::milliseconds patience_;
  Payload bulk_;
  net::Metrics metrics_;  // Sessions count to their end, which the threads below bring.
  std::unique_ptr<IoThreads> server_io_;
  std::unique_ptr<net::RpcServer> server_;
  std::unique_ptr<IoThreads> client_io_;
  std::deque<net::RpcClient> clients_;
};

/// Microseconds of each of the calls that one thread makes, one after another.
std::vector<double> blocking_calls(RpcPair& pair, const char* uid, const Payload& payload, Seconds duration);

/// Calls of "echo" started from the reply of the one before, `in_flight` at a time, each by the next client.
class Chain {
 public:
  Chain(RpcPair& pair, Payload payload, std::size_t in_flight, Seconds duration);

  /// @return calls per second.
  double run();
  std::vector<double>& samples() { return samples_; }  ///< Microseconds of each call.

 private:
  void start();
  void on_reply(std::chrono::steady_clock::time_point before, const Result<net::IncomingReply>& reply);

  RpcPair& pair_;
  const Payload payload_;
  const std::size_t in_flight_;
  const std::chrono::steady_clock::time_point end_;
  std::mutex mutex_;  // Guards all below: clients on several threads share a chain.
  std::size_t running_;
  std::size_t next_client_ = 0;
  std::size_t answered_ = 0;
  std::string failure_;
  std::vector<double> samples_;
  std::binary_semaphore finished_{0};
};

}  // namespace dmoe::bench
