// A blocking caller of experts on one server.
#pragma once

#include "net/rpc_client.hpp"
#include "tests/expert_server/fixtures.hpp"

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>

#include <future>
#include <string>
#include <thread>

namespace dmoe::expert_server::test {

struct Info {
  std::string architecture;
  std::uint32_t max_batch_size = 0;
  std::uint64_t updates = 0;
  std::vector<std::vector<std::int64_t>> input_shapes;
  std::vector<std::vector<std::int64_t>> output_shapes;
};

class TestCaller {
 public:
  explicit TestCaller(net::Endpoint endpoint);
  ~TestCaller();
  TestCaller(const TestCaller&) = delete;
  TestCaller& operator=(const TestCaller&) = delete;

  Result<Info> info(const std::string& uid);
  Outcome forward(const std::string& uid, const Tensors& inputs, std::uint64_t seed = 0) {
    return start_forward(uid, inputs, seed).get();
  }
  Outcome backward(const std::string& uid, const Tensors& inputs, const Tensors& grad_outputs, std::uint64_t seed = 0);
  std::future<Outcome> start_forward(const std::string& uid, const Tensors& inputs, std::uint64_t seed = 0);

 private:
  using Fill = std::function<void(net::schema::Call::Builder, net::Attachments&)>;
  std::future<Result<net::IncomingReply>> start(Fill fill);

  net::Endpoint endpoint_;
  boost::asio::io_context io_;
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_;
  net::RpcClient client_;
  std::thread thread_;
};

}  // namespace dmoe::expert_server::test
