// Any bytes as a frame: what is accepted must be readable to the last byte without a throw.
#include "net/received_frame.hpp"

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

using dmoe::net::FrameBuffer;
using dmoe::net::ReceivedFrame;
using From = ReceivedFrame::From;
namespace schema = dmoe::net::schema;

std::uint64_t sum(capnp::List<schema::Tensor>::Reader tensors) {
  std::uint64_t total = 0;
  for (const auto tensor : tensors) {
    for (const auto size : tensor.getShape()) total += static_cast<std::uint64_t>(size);
    for (const auto byte : tensor.getData()) total += byte;
    total += static_cast<std::uint64_t>(tensor.getCompression());
  }
  return total;
}

std::uint64_t sum(capnp::List<std::uint64_t>::Reader ids) {
  std::uint64_t total = 0;
  for (const auto id : ids) total += id;
  return total;
}

std::uint64_t sum(schema::Call::Reader call) {
  switch (call.which()) {
    case schema::Call::INFO: return call.getInfo().getUid().size();
    case schema::Call::FORWARD: return call.getForward().getUid().size() + sum(call.getForward().getInputs());
    case schema::Call::BACKWARD:
      return call.getBackward().getUid().size() + sum(call.getBackward().getInputs()) +
             sum(call.getBackward().getGradOutputs());
    case schema::Call::PROGRESS: return sum(call.getProgress());
  }
  return 0;
}

std::uint64_t sum(schema::Reply::Reader reply) {
  switch (reply.which()) {
    case schema::Reply::ERROR: return dmoe::net::read_error(reply.getError()).message.size();
    case schema::Reply::INFO: {
      std::uint64_t total = reply.getInfo().getUid().size() + reply.getInfo().getArchitecture().size();
      for (const auto spec : reply.getInfo().getInputs()) total += spec.getShape().size();
      for (const auto spec : reply.getInfo().getOutputs()) total += spec.getShape().size();
      for (const auto offered : reply.getInfo().getCompressions()) total += static_cast<std::uint64_t>(offered);
      return total;
    }
    case schema::Reply::FORWARD: return sum(reply.getForward());
    case schema::Reply::BACKWARD: return sum(reply.getBackward());
    case schema::Reply::PROGRESS: return sum(reply.getProgress());
  }
  return 0;
}

std::uint64_t read_all(schema::Frame::Reader frame) {
  std::uint64_t total = 0;
  if (frame.isCalls()) {
    for (const auto call : frame.getCalls()) total += sum(call);
  } else if (frame.isReplies()) {
    for (const auto reply : frame.getReplies()) total += sum(reply);
  } else {
    total += sum(frame.getCancel());
  }
  return total;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  for (const auto from : {From::kClient, From::kServer}) {
    FrameBuffer buffer(std::size_t{1} << 20U);
    if (size > buffer.max_size()) return 0;
    if (size > 0) std::memcpy(buffer.prepare(size).data(), data, size);
    buffer.commit(size);
    const auto frame = ReceivedFrame::parse(std::move(buffer), from);
    if (frame.has_error()) continue;
    static volatile std::uint64_t sink;
    sink = read_all((*frame)->root());  // A throw ends the program: that is the finding.
  }
  return 0;
}
