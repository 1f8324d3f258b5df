// First weights of linear layers.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>

namespace dmoe::expert_server {

/// Weight and bias of a linear layer, drawn as torch::nn::Linear draws them: evenly from ±1/sqrt(inputs). Unlike there
/// all compute threads draw: a server of many experts is up in a fraction of the time. Depends on the state of torch's
/// default generator only, not on the number of threads.
struct FreshLinearImpl : torch::nn::Module {
  FreshLinearImpl(std::int64_t inputs, std::int64_t outputs);
  at::Tensor weight;  ///< [outputs, inputs] float32
  at::Tensor bias;    ///< [outputs]
};
TORCH_MODULE(FreshLinear);

/// While one lives on a thread, FreshLinear there leaves its memory as the system gave it: somebody is about to
/// overwrite it.
class WithoutFreshWeights {
 public:
  WithoutFreshWeights() noexcept;
  ~WithoutFreshWeights();
  WithoutFreshWeights(const WithoutFreshWeights&) = delete;
  WithoutFreshWeights& operator=(const WithoutFreshWeights&) = delete;

 private:
  bool before_;
};

}  // namespace dmoe::expert_server
