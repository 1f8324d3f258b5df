#include "dmoe/remote_expert.hpp"

#include "dmoe/fresh_seed.hpp"
#include "dmoe/remote_node.hpp"
#include "dmoe/server_health.hpp"
#include "dmoe/single_call.hpp"
#include "net/tensor_finite.hpp"

#include <torch/types.h>

#include <algorithm>
#include <ostream>
#include <sstream>

namespace dmoe {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kServersLast{15};  ///< A heartbeat's period: then others may host the UID.

ExpertUid parsed(const std::string& text) {
  auto uid = parse_expert_uid(text);
  if (uid.has_error()) throw Exception(uid.error());
  return *uid;
}

std::string text_of(const ExpertInfo::Tensor& spec) {
  std::ostringstream text;
  text << "[rows";
  for (const auto size : spec.shape) text << ", " << (size < 0 ? "any" : std::to_string(size));
  text << "] of " << c10::toString(spec.dtype);
  return text.str();
}

bool fits(const torch::Tensor& tensor, const ExpertInfo::Tensor& spec) {
  if (tensor.dim() != static_cast<std::int64_t>(spec.shape.size()) + 1) return false;
  for (std::size_t d = 0; d < spec.shape.size(); ++d) {
    if (spec.shape[d] >= 0 && spec.shape[d] != tensor.size(static_cast<std::int64_t>(d) + 1)) return false;
  }
  return true;
}

bool fit(const std::vector<torch::Tensor>& tensors, const std::vector<ExpertInfo::Tensor>& specs, std::int64_t rows) {
  if (tensors.size() != specs.size()) return false;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!fits(tensors[i], specs[i]) || tensors[i].size(0) != rows) return false;
  }
  return true;
}

Compression agreed(Compression wanted, const ExpertInfo& info) {
  const auto found = std::find(info.compressions.begin(), info.compressions.end(), wanted);
  return found == info.compressions.end() ? Compression::kNone : wanted;
}

}  // namespace

RemoteExpertImpl::RemoteExpertImpl(std::shared_ptr<Client> client, const std::string& uid, RemoteExpertOptions options)
    : RemoteExpertImpl(std::move(client), parsed(uid), options) {}

RemoteExpertImpl::RemoteExpertImpl(std::shared_ptr<Client> client, ExpertUid uid, RemoteExpertOptions options)
    : client_(std::move(client)), uid_(std::move(uid)), options_(options) {
  if (!client_) throw Exception({Errc::kInvalidArgument, "RemoteExpert: the client is null", {}});
}

void RemoteExpertImpl::pretty_print(std::ostream& stream) const {
  stream << "dmoe::RemoteExpert(" << to_string(uid_) << ")";
}

std::shared_ptr<torch::nn::Module> RemoteExpertImpl::clone(const torch::optional<torch::Device>& /*device*/) const {
  auto copy = std::make_shared<RemoteExpertImpl>(client_, uid_, options_);
  copy->train(is_training());
  return copy;
}

torch::Tensor RemoteExpertImpl::forward(const torch::Tensor& input) {
  auto outputs = forward_many({input});
  if (outputs.size() != 1) {
    fail({Errc::kInvalidArgument,
          "it has " + std::to_string(outputs.size()) + " outputs; call forward_many instead of forward",
          {}},
         "forward");
  }
  return outputs.front();
}

std::vector<torch::Tensor> RemoteExpertImpl::forward_many(const std::vector<torch::Tensor>& inputs) {
  const auto deadline = Clock::now() + options_.forward_timeout();
  const auto seed = fresh_seed();
  std::optional<Error> last;
  for (const auto& server : servers(deadline)) {
    std::vector<torch::Tensor> sent;
    auto compression = Compression::kNone;
    auto outputs = try_server(server, inputs, sent, compression, seed, deadline);
    if (outputs.has_error()) {
      last = outputs.error();
      if (last->code == Errc::kInvalidArgument || Clock::now() >= deadline) break;
      continue;
    }
    bool wanted = is_training();
    for (const auto& input : inputs) wanted = wanted || input.requires_grad();
    if (wanted) {
      record_remote("RemoteExpert", *outputs, inputs,
                    [client = client_, uid = uid_, server, sent, seed, compression,
                     timeout = options_.backward_timeout()](const std::vector<torch::Tensor>& grads) {
                      ExpertCall call{uid,  server,     client->health().endpoint_of(*server), sent, grads,
                                      seed, compression};
                      auto gradients = call_expert(*client, std::move(call), Clock::now() + timeout);
                      if (gradients.has_error()) {
                        auto error = gradients.error();
                        error.message = "backward of " + to_string(uid) + ": " + error.message;
                        throw Exception(std::move(error));
                      }
                      for (std::size_t i = 0; i < std::min(sent.size(), gradients->size()); ++i) {
                        const bool none = !sent[i].is_floating_point() || (*gradients)[i].sizes() != sent[i].sizes();
                        if (none) (*gradients)[i] = torch::Tensor();
                      }
                      return *gradients;
                    });
    }
    for (auto& output : *outputs) output = output.to(inputs.front().device());
    return *outputs;
  }
  {
    const std::lock_guard lock(mutex_);
    servers_.clear();
  }
  fail(last.value_or(Error{Errc::kNotFound, "nobody hosts it; start a server with this UID, or check the name", {}}),
       "forward");
}

ExpertInfo RemoteExpertImpl::info() {
  const auto deadline = Clock::now() + options_.forward_timeout();
  std::optional<Error> last;
  for (const auto& server : servers(deadline)) {
    auto schema = this->schema(server, deadline, true);
    if (schema.has_value()) return **schema;
    last = schema.error();
  }
  fail(last.value_or(Error{Errc::kNotFound, "nobody hosts it; start a server with this UID, or check the name", {}}),
       "info");
}

std::vector<RemoteExpertImpl::Server> RemoteExpertImpl::servers(TimePoint deadline) {
  const auto now = Clock::now();
  {
    const std::lock_guard lock(mutex_);
    if (!servers_.empty() && now < servers_until_) return servers_;
  }
  auto found = client_->resolve(uid_, std::chrono::duration_cast<std::chrono::milliseconds>(deadline - now));
  // Those that failed lately come last.
  const auto bans = client_->health().bans()->view(now);
  std::stable_partition(found.begin(), found.end(), [&](const auto& server) { return !bans->banned(uid_, *server); });
  const std::lock_guard lock(mutex_);
  servers_ = found;
  servers_until_ = now + kServersLast;
  return found;
}

Result<std::shared_ptr<const ExpertInfo>> RemoteExpertImpl::schema(const Server& server, TimePoint deadline,
                                                                   bool refresh) {
  if (!refresh) {
    const std::lock_guard lock(mutex_);
    if (schema_) return schema_;
  }
  const auto endpoint = client_->health().endpoint_of(*server);
  auto info = fetch_info(*client_, uid_, endpoint, deadline);
  if (info.has_error()) {
    client_->health().failed(uid_, server, endpoint, info.error());
    return info.error();
  }
  auto shared = std::make_shared<const ExpertInfo>(std::move(*info));
  const std::lock_guard lock(mutex_);
  schema_ = shared;
  return shared;
}

std::vector<torch::Tensor> RemoteExpertImpl::convert(const std::vector<torch::Tensor>& inputs,
                                                     const ExpertInfo& info) const {
  std::vector<torch::Tensor> sent;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const auto& input = inputs[i];
    const auto& spec = info.inputs[i];
    // Numbers may change their width, never their kind: a mask must not turn into weights unnoticed.
    if (input.is_floating_point() != at::isFloatingType(spec.dtype)) {
      fail({Errc::kInvalidArgument,
            "input " + std::to_string(i) + " is " + c10::toString(input.scalar_type()) + ", the expert takes " +
                c10::toString(spec.dtype),
            {}},
           "forward");
    }
    sent.push_back(input.detach().to(torch::kCPU, spec.dtype).contiguous());
  }
  return sent;
}

Result<std::vector<torch::Tensor>> RemoteExpertImpl::try_server(const Server& server,
                                                                const std::vector<torch::Tensor>& inputs,
                                                                std::vector<torch::Tensor>& sent,
                                                                Compression& compression, std::uint64_t seed,
                                                                TimePoint deadline) {
  for (const auto& input : inputs) {
    const auto sendable = check_sendable(input);
    if (sendable.has_error()) return sendable.error();
  }
  if (inputs.empty() || inputs.front().dim() < 1) {
    return Error{Errc::kInvalidArgument, "it needs at least one input with a row dimension", {}};
  }
  const auto rows = inputs.front().size(0);
  auto info = schema(server, deadline, false);
  if (info.has_value() && !fit(inputs, (*info)->inputs, rows)) info = schema(server, deadline, true);
  if (info.has_error()) return info.error();
  if (!fit(inputs, (*info)->inputs, rows)) {
    std::ostringstream text;
    text << "it takes";
    for (const auto& spec : (*info)->inputs) text << " " << text_of(spec);
    text << ", but got";
    for (const auto& input : inputs) text << " " << input.sizes();
    return Error{Errc::kInvalidArgument, text.str(), {}};
  }
  sent = convert(inputs, **info);
  compression = agreed(options_.compression(), **info);
  auto outputs = call_expert(
      *client_, {uid_, server, client_->health().endpoint_of(*server), sent, {}, seed, compression}, deadline);
  if (outputs.has_error()) return outputs;
  if (!fit(*outputs, (*info)->outputs, rows)) {
    info = schema(server, deadline, true);
    if (info.has_error()) return info.error();
    if (!fit(*outputs, (*info)->outputs, rows)) {
      return Error{Errc::kInternal, "its answer does not have the shape that the expert says it gives", {}};
    }
  }
  for (const auto& output : *outputs) {
    if (!net::all_finite(output)) return Error{Errc::kInternal, "it answered with NaN or Inf", {}};
  }
  return outputs;
}

void RemoteExpertImpl::fail(Error error, const char* direction) const {
  error.message = std::string(direction) + " of " + to_string(uid_) + ": " + error.message;
  throw Exception(std::move(error));
}

}  // namespace dmoe
