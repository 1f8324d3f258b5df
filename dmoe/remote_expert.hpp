// One expert on another machine, as a module.
#pragma once

#include "dmoe/client.hpp"
#include "net/compression.hpp"
#include "net/expert_uid.hpp"

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <chrono>
#include <cstdint>
#include <iosfwd>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace dmoe {

/// What an expert says about itself.
struct ExpertInfo {
  struct Tensor {
    torch::Dtype dtype = torch::kFloat32;
    std::vector<std::int64_t> shape;  ///< Without the batch dimension; -1: any size.
    bool requires_grad = false;
  };
  std::string uid;
  std::string architecture;
  std::vector<Tensor> inputs;
  std::vector<Tensor> outputs;
  std::int64_t max_batch_size = 0;
  std::uint64_t updates = 0;              ///< Optimizer steps so far.
  std::vector<Compression> compressions;  ///< What its server reads; none of an old one's.
};

struct RemoteExpertOptions {
  TORCH_ARG(std::chrono::milliseconds, forward_timeout) = std::chrono::milliseconds(5'000);
  TORCH_ARG(std::chrono::milliseconds, backward_timeout) = std::chrono::milliseconds(5'000);
  /// How float32 tensors travel, both ways and in backward too, if the expert's server reads it.
  TORCH_ARG(Compression, compression) = Compression::kNone;
};

/// Calls one expert by UID. It has no parameters here: backward trains the expert where it lives, also when no input
/// needs a gradient (but never under no_grad, nor in eval mode unless an input needs one).
///
/// Inputs are checked against the expert's schema and converted to its types before they are sent; outputs have its
/// types. The schema is cached and asked for again when an answer does not fit it. A server that cannot be reached is
/// replaced by another that hosts the UID, within the time limit; backward goes to the server that answered forward.
/// Thread-safe.
/// @throws Exception: kInvalidArgument, inputs that do not fit (the message has both shapes); kNotFound, nobody hosts
/// the UID; otherwise what the call ended with. Backward throws likewise.
class RemoteExpertImpl : public torch::nn::Module {
 public:
  /// @param uid such as "ffn.3.17".
  RemoteExpertImpl(std::shared_ptr<Client> client, const std::string& uid, RemoteExpertOptions options = {});
  RemoteExpertImpl(std::shared_ptr<Client> client, ExpertUid uid, RemoteExpertOptions options = {});

  /// For experts with one input and one output: [B, …] → [B, …].
  torch::Tensor forward(const torch::Tensor& input);
  /// All inputs and outputs; dimension 0 of each is the row.
  std::vector<torch::Tensor> forward_many(const std::vector<torch::Tensor>& inputs);
  /// Asked afresh.
  ExpertInfo info();

  void pretty_print(std::ostream& stream) const override;
  /// Another caller of the same expert; it asks for the schema anew.
  std::shared_ptr<torch::nn::Module> clone(
      const torch::optional<torch::Device>& device = torch::nullopt) const override;
  const ExpertUid& uid() const noexcept { return uid_; }

 private:
  using Server = std::shared_ptr<const dht::ServerAddress>;
  using TimePoint = std::chrono::steady_clock::time_point;

  std::vector<Server> servers(TimePoint deadline);
  Result<std::shared_ptr<const ExpertInfo>> schema(const Server& server, TimePoint deadline, bool refresh);
  std::vector<torch::Tensor> convert(const std::vector<torch::Tensor>& inputs, const ExpertInfo& info) const;
  Result<std::vector<torch::Tensor>> try_server(const Server& server, const std::vector<torch::Tensor>& inputs,
                                                std::vector<torch::Tensor>& sent, Compression& compression,
                                                std::uint64_t seed, TimePoint deadline);
  [[noreturn]] void fail(Error error, const char* direction) const;

  const std::shared_ptr<Client> client_;
  const ExpertUid uid_;
  const RemoteExpertOptions options_;
  std::mutex mutex_;
  std::vector<Server> servers_;               // Guarded by mutex_. Empty: ask the directory.
  TimePoint servers_until_;                   // Guarded by mutex_.
  std::shared_ptr<const ExpertInfo> schema_;  // Guarded by mutex_. Shared with calls that use it.
};
TORCH_MODULE(RemoteExpert);

}  // namespace dmoe
