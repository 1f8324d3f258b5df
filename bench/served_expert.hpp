// A server in this process and blocking clients of its experts: what the suites about expert servers share.
#pragma once

#include "expert_server/server.hpp"
#include "net/rpc_client.hpp"
#include "net/tensor_codec.hpp"

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <semaphore>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace dmoe::bench {

/// One thread for the sockets of all clients.
class ClientThread {
 public:
  ClientThread() : work_(boost::asio::make_work_guard(io_)), thread_([this] { io_.run(); }) {}
  ~ClientThread() {
    work_.reset();
    thread_.join();
  }
  ClientThread(const ClientThread&) = delete;
  ClientThread& operator=(const ClientThread&) = delete;
  boost::asio::any_io_executor executor() { return io_.get_executor(); }

 private:
  boost::asio::io_context io_{1};
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_;
  std::thread thread_;
};

/// A caller with its own connection, which blocks until its answer, as a training thread does.
class ExpertClient {
 public:
  ExpertClient(ClientThread& thread, std::uint16_t port) : client_(thread.executor()), endpoint_{"127.0.0.1", port} {}

  std::vector<at::Tensor> forward(const std::string& uid, const at::Tensor& input) {
    return call([&](net::schema::Call::Builder call, net::Attachments& attachments) {
      auto request = call.initForward();
      request.setUid(uid);
      net::encode_tensors({input}, request.initInputs(1), attachments).value();
    });
  }

  std::vector<at::Tensor> backward(const std::string& uid, const at::Tensor& input, const at::Tensor& gradient) {
    return call([&](net::schema::Call::Builder call, net::Attachments& attachments) {
      auto request = call.initBackward();
      request.setUid(uid);
      net::encode_tensors({input}, request.initInputs(1), attachments).value();
      net::encode_tensors({gradient}, request.initGradOutputs(1), attachments).value();
    });
  }

 private:
  std::vector<at::Tensor> call(std::function<void(net::schema::Call::Builder, net::Attachments&)> fill) {
    std::binary_semaphore answered(0);
    Result<net::IncomingReply> reply = Error{};
    std::vector<net::CallSpec> calls;
    calls.push_back({std::move(fill), std::chrono::steady_clock::now() + std::chrono::minutes(2),
                     [&](Result<net::IncomingReply> got) {
                       reply = std::move(got);
                       answered.release();
                     }});
    client_.start(endpoint_, std::move(calls));
    answered.acquire();
    if (reply.has_error()) throw std::runtime_error(describe(reply.error()));
    const auto reader = reply->reader();
    return net::decode_tensors(reader.isForward() ? reader.getForward() : reader.getBackward(), reply->frame()).value();
  }

  net::RpcClient client_;
  net::Endpoint endpoint_;
};

/// A server without a disk, alone, on loopback.
inline std::unique_ptr<expert_server::Server> serve(expert_server::ExpertOptions expert, const std::string& pattern,
                                                    int compute_threads, bool grouped = true) {
  expert_server::ServerOptions options;
  options.listen = {"127.0.0.1", 0};
  options.expert_pattern = pattern;
  options.expert = std::move(expert);
  options.compute_threads = compute_threads;
  options.grouped = grouped;
  options.max_queued_batches = 4'096;  // No client is turned away, however small a batch is.
  options.seed = 1;
  auto server = expert_server::Server::start(std::move(options));
  if (server.has_error()) throw std::runtime_error(describe(server.error()));
  return std::move(*server);
}

/// Rows per second of `callers` threads together, each of which repeats `step(caller)`, of `rows` rows, for about
/// `seconds` and at least once. From the first call to the last answer.
inline double rate_of_callers(int callers, const std::function<void(int)>& step, std::int64_t rows, double seconds) {
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [start] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  std::vector<std::future<std::int64_t>> running;
  for (int i = 0; i < callers; ++i) {
    running.push_back(std::async(std::launch::async, [&, i] {
      std::int64_t steps = 0;
      for (; steps == 0 || elapsed() < seconds; ++steps) step(i);
      return steps;
    }));
  }
  std::int64_t steps = 0;
  for (auto& caller : running) steps += caller.get();
  return static_cast<double>(steps * rows) / elapsed();
}

}  // namespace dmoe::bench
