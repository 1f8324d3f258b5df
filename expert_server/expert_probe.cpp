#include "expert_server/expert_probe.hpp"

#include "expert_server/arrival.hpp"
#include "net/tensor_codec.hpp"

#include <torch/types.h>

#include <functional>
#include <stdexcept>
#include <utility>

namespace dmoe::expert_server {
namespace {

using Fill = std::function<void(net::schema::Call::Builder, net::Attachments&)>;

/// The outcome of one call; what it returned is not looked at.
Result<void> call(net::RpcClient& client, const net::Endpoint& endpoint, Fill fill, std::chrono::milliseconds limit,
                  const std::stop_token& stop) {
  const auto answer = Arrival<Result<void>>::make();
  net::CallSpec spec;
  spec.fill = std::move(fill);
  spec.deadline = std::chrono::steady_clock::now() + limit;
  spec.on_reply = [answer](Result<net::IncomingReply> reply) {
    if (!reply) return answer->set(reply.error());
    answer->set({});
  };
  std::vector<net::CallSpec> calls;
  calls.push_back(std::move(spec));
  const auto ids = client.start(endpoint, std::move(calls));
  // The client answers by the deadline; the second on top only bounds a client that was stopped meanwhile.
  if (auto outcome = answer->wait(limit + std::chrono::seconds{1}, stop)) return std::move(*outcome);
  for (const auto id : ids) client.cancel(id);
  return Error{Errc::kCancelled, "the wait for " + net::to_string(endpoint) + " was given up", {}};
}

std::vector<at::Tensor> one_row_of_zeros(const ExpertSchema& schema) {
  std::vector<at::Tensor> inputs;
  for (const auto& spec : schema.inputs) {
    std::vector<std::int64_t> sizes{1};
    for (const auto size : spec.shape) sizes.push_back(size < 0 ? 1 : size);
    inputs.push_back(at::zeros(sizes, spec.dtype));
  }
  return inputs;
}

}  // namespace

Result<void> probe_info(net::RpcClient& client, const net::Endpoint& endpoint, const ExpertUid& uid,
                        std::chrono::milliseconds limit, const std::stop_token& stop) {
  const auto fill = [text = to_string(uid)](net::schema::Call::Builder call, net::Attachments&) {
    call.initInfo().setUid(text);
  };
  return call(client, endpoint, fill, limit, stop);
}

Result<void> probe_forward(net::RpcClient& client, const net::Endpoint& endpoint, const ExpertUid& uid,
                           const ExpertSchema& schema, std::chrono::milliseconds limit, const std::stop_token& stop) {
  const auto inputs = one_row_of_zeros(schema);
  const auto fill = [&](net::schema::Call::Builder call, net::Attachments& attachments) {
    auto forward = call.initForward();
    forward.setUid(to_string(uid));
    const auto list = forward.initInputs(static_cast<unsigned>(inputs.size()));
    const auto encoded = net::encode_tensors(inputs, list, attachments);
    if (!encoded) throw std::runtime_error(describe(encoded.error()));
  };
  return call(client, endpoint, fill, limit, stop);
}

}  // namespace dmoe::expert_server
