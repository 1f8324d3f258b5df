#include "dmoe/call_batch.hpp"

#include "net/tensor_codec.hpp"

#include <algorithm>
#include <map>
#include <stdexcept>

namespace dmoe {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kMessageOverhead = 4'096;  ///< Of a frame beside its tensors' bytes, for calls of usual size.

std::uint64_t tensor_bytes(const ExpertCall& call) {
  std::uint64_t bytes = 0;
  for (const auto& tensor : call.inputs) bytes += tensor.nbytes();
  for (const auto& tensor : call.grad_outputs) bytes += tensor.nbytes();
  return bytes;
}

/// RpcClient takes an exception from `fill` for "cannot be encoded" and fails the calls of the frame with it.
/// @return bytes on the wire.
std::uint64_t encode(const std::vector<at::Tensor>& tensors, capnp::List<net::schema::Tensor>::Builder builder,
                     net::Attachments& attachments, Compression compression) {
  const auto encoded = net::encode_tensors(tensors, builder, attachments, compression);
  if (encoded.has_error()) throw std::invalid_argument(encoded.error().message);
  return net::wire_bytes(builder.asReader());
}

/// @return bytes of the call's tensors on the wire.
std::uint64_t fill(const ExpertCall& call, net::schema::Call::Builder builder, net::Attachments& attachments) {
  const auto inputs = static_cast<unsigned>(call.inputs.size());
  const auto compression = call.compression;
  if (call.grad_outputs.empty()) {
    auto forward = builder.initForward();
    forward.setUid(to_string(call.uid));
    forward.setRngSeed(call.seed);
    forward.setReplyCompression(net::to_wire(compression));
    return encode(call.inputs, forward.initInputs(inputs), attachments, compression);
  }
  auto backward = builder.initBackward();
  backward.setUid(to_string(call.uid));
  backward.setRngSeed(call.seed);
  backward.setReplyCompression(net::to_wire(compression));
  // The inputs travel as they did in forward: the same numbers come out.
  const auto gradients = backward.initGradOutputs(static_cast<unsigned>(call.grad_outputs.size()));
  return encode(call.inputs, backward.initInputs(inputs), attachments, compression) +
         encode(call.grad_outputs, gradients, attachments, compression);
}

}  // namespace

Result<void> check_sendable(const at::Tensor& tensor) {
  if (!tensor.defined()) return Error{Errc::kInvalidArgument, "an input is undefined", {}};
  if (tensor.layout() != at::kStrided) {
    return Error{Errc::kInvalidArgument, "only dense tensors can be sent to experts; call to_dense() first", {}};
  }
  if (tensor.dim() > static_cast<std::int64_t>(net::kMaxTensorDimensions)) {
    return Error{Errc::kInvalidArgument,
                 "a tensor with " + std::to_string(tensor.dim()) + " dimensions cannot be sent; at most " +
                     std::to_string(net::kMaxTensorDimensions),
                 {}};
  }
  const auto dtype = net::to_wire(tensor.scalar_type());
  if (dtype.has_error()) return dtype.error();
  return {};
}

CallBatch::CallBatch(net::RpcClient& rpc, std::size_t max_frame_bytes, TimePoint deadline, net::TraceFile* trace)
    : rpc_(rpc),
      max_frame_bytes_(max_frame_bytes),
      deadline_(deadline),
      trace_(trace),
      inbox_(std::make_shared<Inbox>()) {}

CallBatch::~CallBatch() { cancel_rest(); }

void CallBatch::send(std::vector<ExpertCall> calls) {
  std::map<net::Endpoint, std::vector<std::size_t>> by_endpoint;
  for (auto& call : calls) {
    by_endpoint[call.endpoint].push_back(calls_.size());
    calls_.push_back({std::move(call), 0, Clock::now(), {}, 0, 0, false});
  }
  outstanding_ += calls.size();
  for (const auto& [endpoint, indices] : by_endpoint) {
    std::vector<std::size_t> frame;
    std::size_t bytes = 0;
    for (const auto index : indices) {
      const std::size_t more = tensor_bytes(calls_[index].call) + kMessageOverhead;
      if (!frame.empty() && bytes + more > max_frame_bytes_) {
        send_frame(endpoint, frame);
        frame.clear();
        bytes = 0;
      }
      frame.push_back(index);
      bytes += more;
    }
    send_frame(endpoint, frame);
  }
}

void CallBatch::send_frame(const net::Endpoint& endpoint, const std::vector<std::size_t>& indices) {
  std::vector<net::CallSpec> specs;
  specs.reserve(indices.size());
  for (const auto index : indices) specs.push_back(spec_of(index));
  const auto ids = rpc_.start(endpoint, std::move(specs));
  for (std::size_t i = 0; i < indices.size(); ++i) calls_[indices[i]].id = ids[i];
  ++frames_;
}

net::CallSpec CallBatch::spec_of(std::size_t index) {
  net::CallSpec spec;
  spec.deadline = deadline_;
  // Runs inside `start`, so the call lies where it is now.
  spec.fill = [sent = &calls_[index]](net::schema::Call::Builder builder, net::Attachments& attachments) {
    sent->bytes_sent = fill(sent->call, builder, attachments);
  };
  spec.on_reply = [inbox = inbox_, index](Result<net::IncomingReply> reply) {
    {
      const std::lock_guard lock(inbox->mutex);
      inbox->replies.emplace_back(index, std::move(reply));
    }
    inbox->arrived.notify_one();
  };
  return spec;
}

std::vector<Answer> CallBatch::wait(TimePoint until) {
  std::vector<std::pair<std::size_t, Result<net::IncomingReply>>> replies;
  const auto start = Clock::now();
  do {
    {
      std::unique_lock lock(inbox_->mutex);
      inbox_->arrived.wait_until(lock, until, [&] { return !inbox_->replies.empty(); });
      replies.swap(inbox_->replies);
    }
    std::erase_if(replies, [this](const auto& reply) { return calls_[reply.first].given_up; });
  } while (replies.empty() && outstanding_ > 0 && Clock::now() < until);
  const auto now = Clock::now();
  blocked_ += now - start;
  std::vector<Answer> answers;
  answers.reserve(replies.size());
  for (auto& [index, reply] : replies) {
    calls_[index].answered = now;
    --outstanding_;
    answers.push_back({index, decode(index, reply)});
    if (trace_ != nullptr) {
      const auto& tensors = answers.back().tensors;
      this->trace(index, tensors.has_error() ? describe(tensors.error()) : "answered");
    }
  }
  return answers;
}

Result<std::vector<at::Tensor>> CallBatch::decode(std::size_t index, const Result<net::IncomingReply>& reply) {
  if (reply.has_error()) return reply.error();
  const auto reader = reply->reader();
  if (reader.isError()) return net::read_error(reader.getError());
  const bool backward = !calls_[index].call.grad_outputs.empty();
  if (backward ? !reader.isBackward() : !reader.isForward()) {
    return Error{Errc::kInternal, "the server answered another question than was asked", {}};
  }
  const auto list = backward ? reader.getBackward() : reader.getForward();
  auto tensors = net::decode_tensors(list, reply->frame());
  if (tensors.has_error())
    return Error{Errc::kInternal, "an answer that cannot be read: " + tensors.error().message, {}};
  calls_[index].bytes_received += net::wire_bytes(list);
  return tensors;
}

void CallBatch::check(const std::vector<std::size_t>& indices) {
  std::vector<net::CallId> ids;
  ids.reserve(indices.size());
  for (const auto index : indices) ids.push_back(calls_[index].id);
  rpc_.check(std::move(ids));
}

void CallBatch::give_up(std::size_t index) {
  auto& sent = calls_[index];
  rpc_.cancel(sent.id);
  sent.answered = Clock::now();
  sent.given_up = true;
  --outstanding_;
  if (trace_ != nullptr) trace(index, "given up");
}

void CallBatch::cancel_rest() {
  for (std::size_t i = 0; i < calls_.size() && outstanding_ > 0; ++i) {
    if (is_outstanding(i)) give_up(i);
  }
}

void CallBatch::trace(std::size_t index, const std::string& outcome) const {
  const auto& sent = calls_[index];
  const auto uid = to_string(sent.call.uid);
  net::TraceSpan span;
  span.name = std::string(sent.call.direction()) + " " + uid;
  span.call = net::trace_id(sent.call.seed, uid, !sent.call.grad_outputs.empty());
  span.begin = sent.sent;
  span.end = sent.answered.value_or(Clock::now());
  span.details = {{"server", to_string(sent.call.endpoint)},
                  {"rows", std::to_string(sent.call.rows())},
                  {"bytes sent", std::to_string(bytes_sent(index))},
                  {"bytes received", std::to_string(sent.bytes_received)},
                  {"outcome", outcome}};
  if (sent.call.hedge) span.details.emplace_back("hedge", "yes");
  trace_->add(std::move(span));
}

std::chrono::nanoseconds CallBatch::waited(std::size_t index) const {
  return calls_[index].answered.value_or(Clock::now()) - calls_[index].sent;
}

}  // namespace dmoe
