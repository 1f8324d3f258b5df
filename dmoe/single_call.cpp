#include "dmoe/single_call.hpp"

#include "dmoe/server_health.hpp"
#include "net/tensor_codec.hpp"

#include <future>

namespace dmoe {
namespace {

Result<ExpertInfo::Tensor> read_spec(net::schema::TensorSpec::Reader reader) {
  const auto dtype = net::from_wire(reader.getDtype());
  if (dtype.has_error()) return dtype.error();
  ExpertInfo::Tensor spec{*dtype, {}, reader.getRequiresGrad()};
  for (const auto size : reader.getShape()) spec.shape.push_back(size);
  return spec;
}

Result<std::vector<ExpertInfo::Tensor>> read_specs(capnp::List<net::schema::TensorSpec>::Reader reader) {
  std::vector<ExpertInfo::Tensor> specs;
  for (const auto tensor : reader) {
    auto spec = read_spec(tensor);
    if (spec.has_error()) return spec.error();
    specs.push_back(std::move(*spec));
  }
  return specs;
}

Result<ExpertInfo> read_info(net::schema::ExpertInfo::Reader reader) {
  auto inputs = read_specs(reader.getInputs());
  if (inputs.has_error()) return inputs.error();
  auto outputs = read_specs(reader.getOutputs());
  if (outputs.has_error()) return outputs.error();
  std::vector<Compression> compressions;
  for (const auto offered : reader.getCompressions()) {
    if (const auto known = net::from_wire(offered); known.has_value()) compressions.push_back(*known);
  }
  return ExpertInfo{reader.getUid().cStr(), reader.getArchitecture().cStr(), std::move(*inputs),
                    std::move(*outputs),    reader.getMaxBatchSize(),        reader.getUpdates(),
                    std::move(compressions)};
}

}  // namespace

Result<std::vector<at::Tensor>> call_expert(Client& client, ExpertCall call, CallBatch::TimePoint deadline) {
  const auto uid = call.uid;
  const auto server = call.server;
  const auto endpoint = call.endpoint;
  CallBatch batch(client.rpc(), client.max_frame_bytes(), deadline, client.trace());
  std::vector<ExpertCall> calls;
  calls.push_back(std::move(call));
  batch.send(std::move(calls));
  auto answers = batch.wait(deadline);
  if (answers.empty()) {
    const Error error{Errc::kDeadlineExceeded, "no answer from " + to_string(endpoint) + " in time", {}};
    client.health().failed(uid, server, endpoint, error);
    return error;
  }
  auto& result = answers.front().tensors;
  if (result.has_error()) {
    client.health().failed(uid, server, endpoint, result.error());
  } else {
    client.health().answered(uid, *server);
  }
  return std::move(result);
}

Result<ExpertInfo> fetch_info(Client& client, const ExpertUid& uid, const net::Endpoint& endpoint,
                              CallBatch::TimePoint deadline) {
  // Shared: the answer may come after this function returned.
  auto answer = std::make_shared<std::promise<Result<net::IncomingReply>>>();
  auto future = answer->get_future();
  net::CallSpec call;
  call.fill = [text = to_string(uid)](net::schema::Call::Builder builder, net::Attachments&) {
    builder.initInfo().setUid(text);
  };
  call.deadline = deadline;
  call.on_reply = [answer](Result<net::IncomingReply> reply) { answer->set_value(std::move(reply)); };
  std::vector<net::CallSpec> calls;
  calls.push_back(std::move(call));
  client.rpc().start(endpoint, std::move(calls));
  const auto reply = future.get();  // By the deadline: the client's promise.
  if (reply.has_error()) return reply.error();
  const auto reader = reply->reader();
  if (reader.isError()) return net::read_error(reader.getError());
  if (!reader.isInfo()) return Error{Errc::kInternal, "the server answered another question than was asked", {}};
  return read_info(reader.getInfo());
}

}  // namespace dmoe
