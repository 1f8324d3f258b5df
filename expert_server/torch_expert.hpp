// An expert whose parameters and buffers are those of a torch module.
#pragma once

#include "expert_server/expert_module.hpp"

#include <torch/nn/module.h>

#include <vector>

namespace dmoe::expert_server {

/// Base of the built-in architectures.
class TorchExpert : public ExpertModule {
 public:
  const ExpertSchema& schema() const override { return schema_; }

  std::vector<NamedTensor> parameters() const override {
    std::vector<NamedTensor> found;
    for (const auto& item : holder_.named_parameters()) found.push_back({item.key(), item.value()});
    return found;
  }

  std::vector<NamedTensor> buffers() const override {
    std::vector<NamedTensor> found;
    for (const auto& item : holder_.named_buffers()) found.push_back({item.key(), item.value()});
    return found;
  }

  bool runs_beside_others() const override { return true; }

 protected:
  struct Holder : torch::nn::Module {};
  Holder holder_;  ///< Registers the parts under the names that checkpoints use.
  ExpertSchema schema_;
};

}  // namespace dmoe::expert_server
