// A pipeline of experts on other machines.
#pragma once

#include "dmoe/remote_expert.hpp"

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <iosfwd>
#include <memory>
#include <string>
#include <vector>

namespace dmoe {

/// Fixed experts one after the other, each wherever its UID is hosted; they train as they do in RemoteExpert, which
/// says what is thrown. A stage whose server is gone is taken over by another that hosts its UID. Thread-safe.
class RemoteSequentialImpl : public torch::nn::Module {
 public:
  /// @param uids such as {"embed.0", "block.0", "block.1"}; at least one.
  RemoteSequentialImpl(const std::shared_ptr<Client>& client, const std::vector<std::string>& uids,
                       const RemoteExpertOptions& options = {});

  /// [B, …] → [B, …] through every stage.
  torch::Tensor forward(const torch::Tensor& input);
  void pretty_print(std::ostream& stream) const override;
  /// Other callers of the same experts.
  std::shared_ptr<torch::nn::Module> clone(
      const torch::optional<torch::Device>& device = torch::nullopt) const override;

  const std::vector<RemoteExpert>& stages() const noexcept { return stages_; }

 private:
  const std::shared_ptr<Client> client_;
  const std::vector<std::string> uids_;
  const RemoteExpertOptions options_;
  std::vector<RemoteExpert> stages_;
};
TORCH_MODULE(RemoteSequential);

}  // namespace dmoe
