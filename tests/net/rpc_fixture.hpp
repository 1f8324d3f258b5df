// A server and a client on threads of their own, for tests that talk over a real socket.
#pragma once

#include "net/rpc_client.hpp"
#include "net/rpc_server.hpp"
#include "testbed/io_threads.hpp"

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace dmoe::test {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

/// Long enough that only a hang reaches it.
inline constexpr auto kPatience = std::chrono::seconds{30};
inline Clock::time_point soon() { return Clock::now() + kPatience; }

using testbed::IoThreads;

/// A listening server; ends with its sessions closed.
class TestServer {
 public:
  explicit TestServer(net::RpcServer::CallHandler handler, net::RpcServerOptions options = {}, int threads = 1);
  ~TestServer();
  net::RpcServer& server() { return *server_; }
  net::Endpoint endpoint() const { return {"127.0.0.1", server_->port()}; }
  /// Waits for the end of stop().
  void stop(std::chrono::milliseconds grace = 0ms);

 private:
  IoThreads io_;
  std::unique_ptr<net::RpcServer> server_;
};

class TestClient {
 public:
  explicit TestClient(net::RpcClientOptions options = {}, int threads = 1);
  ~TestClient();
  net::RpcClient& client() { return *client_; }

  using Future = std::future<Result<net::IncomingReply>>;
  /// A forward call of `uid` whose rng seed is `seed` and whose one input is `bytes` of uint8.
  Future forward(const net::Endpoint& endpoint, const std::string& uid, std::uint64_t seed = 0,
                 const std::string& bytes = {}, Clock::time_point deadline = soon());
  net::CallId start_forward(const net::Endpoint& endpoint, const std::string& uid, std::uint64_t seed,
                            const std::string& bytes, Clock::time_point deadline, Future& future);

 private:
  IoThreads io_;
  std::unique_ptr<net::RpcClient> client_;
};

/// Writes a forward call as TestClient sends it.
void fill_forward(net::schema::Call::Builder call, const std::string& uid, std::uint64_t seed,
                  const std::string& bytes);
/// Answers with the inputs.
void echo(net::IncomingCall call);
/// The bytes of a forward reply's first tensor.
std::string bytes_of(const net::IncomingReply& reply);

/// Gets a future's value, failing the test instead of hanging.
Result<net::IncomingReply> get(TestClient::Future& future);
/// Waits for `condition`, failing the test instead of hanging.
void wait_until(const std::function<bool()>& condition);

}  // namespace dmoe::test
