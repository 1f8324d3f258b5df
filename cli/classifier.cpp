#include "cli/classifier.hpp"

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>

namespace dmoe::cli {

ClassifierImpl::ClassifierImpl(std::int64_t features, std::int64_t classes, std::shared_ptr<Client> client,
                               const DMoEOptions& layer_options) {
  const std::int64_t hidden = layer_options.in_features();
  encoder = register_module("encoder", torch::nn::Linear(features, hidden));
  norm_in = register_module("norm_in", torch::nn::LayerNorm(torch::nn::LayerNormOptions({hidden})));
  experts = register_module("experts", DMoE(std::move(client), layer_options));
  norm_out = register_module("norm_out", torch::nn::LayerNorm(torch::nn::LayerNormOptions({hidden})));
  head = register_module("head", torch::nn::Linear(hidden, classes));
}

torch::Tensor ClassifierImpl::forward(const torch::Tensor& input) {
  const torch::Tensor hidden = norm_in(torch::relu(encoder(input)));
  return head(norm_out(hidden + experts(hidden)));
}

double accuracy(Classifier& model, const LabelledImages& images, std::int64_t batch_size) {
  const torch::NoGradGuard no_grad;
  model->eval();
  std::int64_t right = 0;
  for (std::int64_t first = 0; first < images.size(); first += batch_size) {
    const std::int64_t last = std::min(first + batch_size, images.size());
    const Batch batch = batch_of(images, torch::arange(first, last, torch::kInt64));
    right += model->forward(batch.inputs).argmax(1).eq(batch.labels).sum().item<std::int64_t>();
  }
  model->train();
  return static_cast<double>(right) / static_cast<double>(images.size());
}

}  // namespace dmoe::cli
