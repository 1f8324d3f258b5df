#include "tests/expert_server/test_caller.hpp"

#include "net/tensor_codec.hpp"

#include <memory>
#include <utility>

namespace dmoe::expert_server::test {
namespace {

Outcome tensors_of(const net::IncomingReply& reply, bool backward) {
  const auto reader = reply.reader();
  return net::decode_tensors(backward ? reader.getBackward() : reader.getForward(), reply.frame());
}

}  // namespace

TestCaller::TestCaller(net::Endpoint endpoint)
    : endpoint_(std::move(endpoint)),
      work_(boost::asio::make_work_guard(io_)),
      client_(io_.get_executor()),
      thread_([this] { io_.run(); }) {}

TestCaller::~TestCaller() {
  client_.stop();
  work_.reset();
  thread_.join();
}

std::future<Result<net::IncomingReply>> TestCaller::start(Fill fill) {
  const auto promise = std::make_shared<std::promise<Result<net::IncomingReply>>>();
  net::CallSpec spec;
  spec.fill = std::move(fill);
  spec.deadline = std::chrono::steady_clock::now() + std::chrono::seconds{60};
  spec.on_reply = [promise](Result<net::IncomingReply> reply) { promise->set_value(std::move(reply)); };
  std::vector<net::CallSpec> calls;
  calls.push_back(std::move(spec));
  client_.start(endpoint_, std::move(calls));
  return promise->get_future();
}

Result<Info> TestCaller::info(const std::string& uid) {
  auto reply = start([uid](auto call, auto&) { call.initInfo().setUid(uid); }).get();
  if (!reply) return reply.error();
  const auto reader = reply->reader().getInfo();
  Info info{reader.getArchitecture().cStr(), reader.getMaxBatchSize(), reader.getUpdates(), {}, {}};
  for (const auto spec : reader.getInputs()) {
    const auto shape = spec.getShape();
    info.input_shapes.emplace_back();
    for (const auto size : shape) info.input_shapes.back().push_back(size);
  }
  for (const auto spec : reader.getOutputs()) {
    info.output_shapes.emplace_back();
    for (const auto size : spec.getShape()) info.output_shapes.back().push_back(size);
  }
  return info;
}

std::future<Outcome> TestCaller::start_forward(const std::string& uid, const Tensors& inputs, std::uint64_t seed) {
  auto reply = start([&](auto call, auto& attachments) {
    auto forward = call.initForward();
    forward.setUid(uid);
    forward.setRngSeed(seed);
    net::encode_tensors(inputs, forward.initInputs(static_cast<unsigned>(inputs.size())), attachments).value();
  });
  return std::async(std::launch::deferred, [reply = std::move(reply)]() mutable -> Outcome {
    auto answer = reply.get();
    if (!answer) return answer.error();
    return tensors_of(*answer, false);
  });
}

Outcome TestCaller::backward(const std::string& uid, const Tensors& inputs, const Tensors& grad_outputs,
                             std::uint64_t seed) {
  auto answer =
      start([&](auto call, auto& attachments) {
        auto backward = call.initBackward();
        backward.setUid(uid);
        backward.setRngSeed(seed);
        net::encode_tensors(inputs, backward.initInputs(static_cast<unsigned>(inputs.size())), attachments).value();
        net::encode_tensors(grad_outputs, backward.initGradOutputs(static_cast<unsigned>(grad_outputs.size())),
                            attachments)
            .value();
      }).get();
  if (!answer) return answer.error();
  return tensors_of(*answer, true);
}

}  // namespace dmoe::expert_server::test
