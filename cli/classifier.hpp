// The model that `dmoe train` and `dmoe demo` train.
#pragma once

#include "cli/image_dataset.hpp"

#include "dmoe/dmoe.hpp"

#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <cstdint>

namespace dmoe::cli {

/// Linear(features → h) → ReLU → LayerNorm → + DMoE → LayerNorm → Linear(h → classes).
/// The residual path lets a row pass whose experts all failed.
class ClassifierImpl : public torch::nn::Module {
 public:
  /// @param layer_options its in_features is h.
  ClassifierImpl(std::int64_t features, std::int64_t classes, std::shared_ptr<Client> client,
                 const DMoEOptions& layer_options);

  /// [B, features] → logits [B, classes].
  torch::Tensor forward(const torch::Tensor& input);

  torch::nn::Linear encoder{nullptr};
  torch::nn::LayerNorm norm_in{nullptr};
  DMoE experts{nullptr};
  torch::nn::LayerNorm norm_out{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Classifier);

/// Share of `images` whose largest logit is the label's, 0 to 1; in eval mode and without grad, `batch_size` rows at a
/// time. @throws Exception when the layer does; std::exception of torch.
double accuracy(Classifier& model, const LabelledImages& images, std::int64_t batch_size);

}  // namespace dmoe::cli
