#include "expert_server/call_handler.hpp"

#include "expert_server/call_trace.hpp"
#include "net/tensor_codec.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace dmoe::expert_server {
namespace {

using net::schema::Call;

std::uint64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  std::uint64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += tensor.nbytes();
  return bytes;
}

/// A wish: one that this server does not know is not granted.
Compression wanted_compression(const Call::Reader& call, Direction direction) {
  const auto wanted = direction == Direction::kForward ? call.getForward().getReplyCompression()
                                                       : call.getBackward().getReplyCompression();
  const auto known = net::from_wire(wanted);
  return known ? *known : Compression::kNone;
}

/// What decoding the call's compressed tensors allocates, at most.
std::uint64_t expanded_bytes_of(const Call::Reader& call, Direction direction) {
  if (direction == Direction::kForward) return net::expanded_bytes(call.getForward().getInputs());
  return net::expanded_bytes(call.getBackward().getInputs()) + net::expanded_bytes(call.getBackward().getGradOutputs());
}

/// The answer to one forward or backward call.
class RpcReply final : public TaskReply {
 public:
  RpcReply(net::IncomingCall call, Direction direction, ServerMetrics& metrics, ExpertMeters* meters,
           RefusalLog& refusals, CallTrace trace)
      : call_(std::move(call)),
        direction_(direction),
        compression_(wanted_compression(call_.reader(), direction)),
        metrics_(metrics),
        meters_(meters),
        refusals_(refusals),
        trace_(std::move(trace)) {}

  void started(TimePoint now, std::size_t tasks, std::int64_t rows) override { trace_.started(now, tasks, rows); }

  void succeed(std::vector<at::Tensor> tensors) override {
    trace_.computed(std::chrono::steady_clock::now());
    call_.reply([&](net::schema::Reply::Builder reply, net::Attachments& attachments) {
      const auto count = static_cast<unsigned>(tensors.size());
      const auto list = direction_ == Direction::kForward ? reply.initForward(count) : reply.initBackward(count);
      const auto encoded = net::encode_tensors(tensors, list, attachments, compression_);
      if (!encoded) throw std::runtime_error(describe(encoded.error()));  // Answered as kInternal by the call.
    });
    metrics_.answered(direction_, nullptr);
    const auto bytes = bytes_of(tensors);
    metrics_.sent(direction_, bytes);
    if (meters_ != nullptr) meters_->answered(direction_, bytes);
    trace_.replied(std::chrono::steady_clock::now());
  }

  void fail(const Error& error) override {
    if (error.code == Errc::kInvalidArgument) refusals_.note(call_.caller(), error);
    call_.fail(error);
    metrics_.answered(direction_, &error);
    if (meters_ != nullptr) meters_->failed(error);
    trace_.failed(std::chrono::steady_clock::now(), error);
  }

  bool cancelled() const override { return call_.cancelled(); }
  std::string caller() const override { return call_.caller(); }

 private:
  net::IncomingCall call_;
  Direction direction_;
  Compression compression_;
  ServerMetrics& metrics_;
  ExpertMeters* meters_;
  RefusalLog& refusals_;
  CallTrace trace_;
};

std::string_view text_of(capnp::Text::Reader text) { return {text.begin(), text.size()}; }

Result<void> decode(const Call::Reader& call, Direction direction, const std::shared_ptr<const void>& frame,
                    Task& task) {
  const bool backward = direction == Direction::kBackward;
  auto inputs = net::decode_tensors(backward ? call.getBackward().getInputs() : call.getForward().getInputs(), frame);
  if (!inputs) return inputs.error();
  task.inputs = std::move(*inputs);
  task.rng_seed = backward ? call.getBackward().getRngSeed() : call.getForward().getRngSeed();
  if (!backward) return {};
  auto gradients = net::decode_tensors(call.getBackward().getGradOutputs(), frame);
  if (!gradients) return gradients.error();
  task.grad_outputs = std::move(*gradients);
  return {};
}

Result<void> check(const ExpertSchema& schema, Direction direction, Task& task) {
  const auto rows = check_tensors(task.inputs, schema.inputs, "input");
  if (!rows) return rows.error();
  task.rows = *rows;
  if (direction == Direction::kForward) return {};
  const auto gradient_rows = check_tensors(task.grad_outputs, schema.outputs, "gradient");
  if (!gradient_rows) return gradient_rows.error();
  if (*gradient_rows == *rows) return {};
  return Error{Errc::kInvalidArgument,
               "the inputs have " + std::to_string(*rows) + " rows, the gradients " + std::to_string(*gradient_rows),
               {}};
}

constexpr std::chrono::milliseconds kMemoryRetry{50};

/// What computing a full batch of such rows needs, beside the calls' own tensors. A multiple of what a row holds, since
/// an expert's function is not known here: the built-in block keeps, for its backward pass, six activations of four
/// times the width; without one, two at a time.
std::uint64_t batch_memory(const ExpertBackend& backend, Direction direction, const Task& task) {
  std::uint64_t widest = 0;
  for (const auto& tensor : task.inputs) widest = std::max<std::uint64_t>(widest, tensor.nbytes());
  const std::uint64_t factor = direction == Direction::kForward ? 8 : 24;
  const auto rows = static_cast<std::uint64_t>(std::max<std::int64_t>(1, task.rows));
  return factor * (widest / rows) * static_cast<std::uint64_t>(backend.max_batch_size());
}

void write_specs(const std::vector<TensorSpec>& specs, capnp::List<net::schema::TensorSpec>::Builder list) {
  for (std::size_t i = 0; i < specs.size(); ++i) {
    auto builder = list[static_cast<unsigned>(i)];
    const auto dtype = net::to_wire(specs[i].dtype);
    if (!dtype) throw std::runtime_error(describe(dtype.error()));
    builder.setDtype(*dtype);
    builder.setRequiresGrad(specs[i].requires_grad);
    auto shape = builder.initShape(static_cast<unsigned>(specs[i].shape.size()));
    for (std::size_t d = 0; d < specs[i].shape.size(); ++d) shape.set(static_cast<unsigned>(d), specs[i].shape[d]);
  }
}

}  // namespace

Error CallHandler::unknown(std::string_view uid) const {
  const std::string name(uid.substr(0, kMaxUidLength));
  if (table_.loading()) {
    return {Errc::kUnavailable, "expert " + name + " is not loaded yet: the server is starting", {}};
  }
  return {Errc::kNotFound, "expert " + name + " is not hosted here", {}};
}

void CallHandler::handle(net::IncomingCall call) const {
  const auto reader = call.reader();
  switch (reader.which()) {
    case Call::INFO: return answer_info(call);
    case Call::FORWARD:
    case Call::BACKWARD: {
      const auto direction = reader.which() == Call::FORWARD ? Direction::kForward : Direction::kBackward;
      if (auto submitted = submit(call, direction); !submitted) {
        const auto error = submitted.error();
        metrics_.answered(direction, &error);
        if (error.code == Errc::kInvalidArgument) refusals_.note(call.caller(), error);
        call.fail(error);
      }
      return;
    }
    case Call::PROGRESS: break;  // Answered by the connection.
  }
  call.fail({Errc::kInvalidArgument, "unknown kind of call: the caller is of a newer version", {}});
}

void CallHandler::answer_info(net::IncomingCall& call) const {
  const auto uid = text_of(call.reader().getInfo().getUid());
  const auto expert = table_.find(uid);
  if (!expert) return call.fail(unknown(uid));
  const auto& backend = *expert->backend;
  call.reply([&](net::schema::Reply::Builder reply, net::Attachments&) {
    auto info = reply.initInfo();
    info.setUid(backend.uid_text());
    info.setArchitecture(backend.description().architecture);
    write_specs(backend.schema().inputs, info.initInputs(static_cast<unsigned>(backend.schema().inputs.size())));
    write_specs(backend.schema().outputs, info.initOutputs(static_cast<unsigned>(backend.schema().outputs.size())));
    info.setMaxBatchSize(static_cast<std::uint32_t>(backend.max_batch_size()));
    info.setUpdates(backend.updates());
    auto compressions = info.initCompressions(kCompressions.size());
    for (unsigned i = 0; i < kCompressions.size(); ++i) compressions.set(i, net::to_wire(kCompressions[i]));
  });
}

/// Room for `bytes` and, when the call comes to be computed, for the batch.
Result<MemoryBudget::Lease> CallHandler::reserve(const ExpertBackend& backend, Direction direction, const Task& task,
                                                 std::uint64_t bytes) const {
  const auto limit = budget_->limit();
  const auto batch = std::min(limit / 2, batch_memory(backend, direction, task));
  if (auto lease = budget_->take(bytes, batch)) return lease;
  const auto mib = [](std::uint64_t count) { return std::to_string(count >> 20U) + " MiB"; };
  if (bytes > limit - batch) {
    return Error{Errc::kInvalidArgument,
                 "the call needs " + mib(bytes) + ", max_memory leaves " + mib(limit - batch) +
                     " for all calls of this server: split it",
                 {}};
  }
  return Error{Errc::kOverloaded,
               "calls hold " + mib(budget_->used()) + " of the " + mib(limit - batch) + " that max_memory leaves them",
               kMemoryRetry};
}

Result<void> CallHandler::submit(net::IncomingCall& call, Direction direction) const {
  const auto reader = call.reader();
  const auto uid =
      text_of(direction == Direction::kForward ? reader.getForward().getUid() : reader.getBackward().getUid());
  const auto expert = table_.find(uid);
  if (!expert) return unknown(uid);
  auto queued = queue(expert, call, direction);
  if (!queued && expert->meters != nullptr) expert->meters->failed(queued.error());
  return queued;
}

/// An error: the call is not answered yet.
Result<void> CallHandler::queue(const std::shared_ptr<HostedExpert>& expert, net::IncomingCall& call,
                                Direction direction) const {
  // Held while it is not clear whether the call is sound, and how large.
  const auto expanded = expanded_bytes_of(call.reader(), direction);
  const auto expanding = budget_->take(expanded);
  if (!expanding) return Error{Errc::kOverloaded, "no memory to expand the call's compressed tensors", kMemoryRetry};
  Task task;
  if (auto decoded = decode(call.reader(), direction, call.frame(), task); !decoded) return decoded;
  if (auto checked = check(expert->backend->schema(), direction, task); !checked) return checked;
  const auto bytes = bytes_of(task.inputs) + bytes_of(task.grad_outputs);
  metrics_.received(direction, bytes);
  if (expert->meters != nullptr) expert->meters->received(direction, bytes);
  // The answer may be as large as the call. The call's own bytes are counted with their frame, unless it was small or
  // they lie elsewhere now.
  const bool counted = call.frame_is_counted() && expanded == 0;
  auto lease = reserve(*expert->backend, direction, task, counted ? bytes : 2 * bytes);
  if (!lease) return lease.error();
  task.memory = std::move(*lease);
  task.arrived = std::chrono::steady_clock::now();
  task.deadline = call.deadline();
  CallTrace trace(trace_, expert->backend->uid_text(), direction, task.rng_seed, task.arrived);
  auto reply =
      std::make_unique<RpcReply>(std::move(call), direction, metrics_, expert->meters, refusals_, std::move(trace));
  auto* refused = reply.get();
  task.reply = std::move(reply);
  if (auto accepted = runtimes_.of(*expert).submit(expert, direction, task); !accepted) refused->fail(accepted.error());
  return {};
}

}  // namespace dmoe::expert_server
