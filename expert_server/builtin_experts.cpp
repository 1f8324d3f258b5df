#include "expert_server/builtin_experts.hpp"

#include "expert_server/linear.hpp"
#include "expert_server/torch_expert.hpp"

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>
#include <torch/types.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace dmoe::expert_server {
namespace {

at::Tensor through(const torch::nn::Linear& layer, const at::Tensor& x) {
  return apply_linear(x, layer->weight, layer->bias);
}

class NopExpert final : public TorchExpert {
 public:
  explicit NopExpert(std::int64_t hidden_dim) { schema_.inputs = schema_.outputs = {{at::kFloat, {hidden_dim}}}; }

  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs, at::Generator& /*generator*/) override {
    return inputs;
  }
};

class DetDropoutExpert final : public TorchExpert {
 public:
  DetDropoutExpert(std::int64_t h, double dropout) : kept_(1 - dropout), widen_(h, 2 * h), narrow_(2 * h, h) {
    schema_.outputs = {{at::kFloat, {h}}};
    schema_.inputs = {{at::kFloat, {h}}, {at::kBool, {h}, false}};
    holder_.register_module("widen", widen_);
    holder_.register_module("narrow", narrow_);
  }

  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs, at::Generator& /*generator*/) override {
    return {through(narrow_, through(widen_, inputs[0] * inputs[1] / kept_).relu())};
  }

 private:
  double kept_;
  torch::nn::Linear widen_, narrow_;
};

class LstmExpert final : public TorchExpert {
 public:
  explicit LstmExpert(std::int64_t h) : lstm_(torch::nn::LSTMOptions(h, h).batch_first(true)) {
    schema_.inputs = schema_.outputs = {{at::kFloat, {-1, h}}};
    holder_.register_module("lstm", lstm_);
  }

  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs, at::Generator& /*generator*/) override {
    if (inputs[0].size(1) == 0) throw std::invalid_argument("a sequence needs at least one token");
    return {std::get<0>(lstm_(inputs[0]))};
  }

 private:
  torch::nn::LSTM lstm_;
};

struct TransformerSizes {
  std::int64_t width;
  std::int64_t heads;
  std::int64_t feedforward;
  double dropout;
  bool padding_mask;
};

class TransformerExpert final : public TorchExpert {
 public:
  explicit TransformerExpert(const TransformerSizes& sizes)
      : sizes_(sizes),
        attention_in_(sizes.width, 3 * sizes.width),
        attention_out_(sizes.width, sizes.width),
        widen_(sizes.width, sizes.feedforward),
        narrow_(sizes.feedforward, sizes.width),
        attention_norm_(torch::nn::LayerNormOptions({sizes.width})),
        output_norm_(torch::nn::LayerNormOptions({sizes.width})) {
    schema_.inputs = schema_.outputs = {{at::kFloat, {-1, sizes.width}}};
    if (sizes.padding_mask) schema_.inputs.push_back({at::kBool, {-1}, false});
    holder_.register_module("attention_in", attention_in_);
    holder_.register_module("attention_out", attention_out_);
    holder_.register_module("attention_norm", attention_norm_);
    holder_.register_module("widen", widen_);
    holder_.register_module("narrow", narrow_);
    holder_.register_module("output_norm", output_norm_);
  }

  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs, at::Generator& generator) override {
    const auto& tokens = inputs[0];
    if (tokens.size(1) == 0) throw std::invalid_argument("a sequence needs at least one token");
    const auto mask = sizes_.padding_mask ? inputs[1] : at::Tensor();
    if (mask.defined() && mask.size(1) != tokens.size(1)) {
      throw std::invalid_argument("the padding mask has " + std::to_string(mask.size(1)) + " tokens, the input " +
                                  std::to_string(tokens.size(1)));
    }
    auto hidden = attention_norm_(tokens + drop(attend(tokens, mask, generator), generator));
    auto inner = drop(torch::gelu(through(widen_, hidden)), generator);
    return {output_norm_(hidden + drop(through(narrow_, inner), generator))};
  }

  bool one_task_at_a_time() const override { return sizes_.dropout > 0; }

 private:
  at::Tensor drop(const at::Tensor& values, at::Generator& generator) const {
    if (sizes_.dropout <= 0) return values;
    const double kept = 1 - sizes_.dropout;
    return values * at::empty_like(values).bernoulli_(kept, generator).div_(kept);
  }

  /// [rows, tokens, width] → the same: scaled dot-product attention of each row over its own tokens.
  at::Tensor attend(const at::Tensor& tokens, const at::Tensor& mask, at::Generator& generator) {
    const auto rows = tokens.size(0);
    const auto length = tokens.size(1);
    const auto head_width = sizes_.width / sizes_.heads;
    const auto split =
        through(attention_in_, tokens).view({rows, length, 3, sizes_.heads, head_width}).permute({2, 0, 3, 1, 4});
    auto scores = torch::matmul(split[0], split[1].transpose(-2, -1)) / std::sqrt(static_cast<double>(head_width));
    if (mask.defined()) {
      // A finite bound: a row whose tokens are all padding attends evenly instead of giving NaN.
      scores = scores.masked_fill(mask.view({rows, 1, 1, length}), -1e30);
    }
    const auto weights = drop(torch::softmax(scores, -1), generator);
    const auto mixed = torch::matmul(weights, split[2]).transpose(1, 2).reshape({rows, length, sizes_.width});
    return through(attention_out_, mixed);
  }

  TransformerSizes sizes_;
  torch::nn::Linear attention_in_, attention_out_, widen_, narrow_;
  torch::nn::LayerNorm attention_norm_, output_norm_;
};

std::int64_t default_heads(std::int64_t width) {
  std::int64_t heads = 1;
  for (std::int64_t candidate = 1; candidate <= std::min<std::int64_t>(16, width); ++candidate) {
    if (width % candidate == 0) heads = candidate;
  }
  return heads;
}

}  // namespace

std::unique_ptr<ExpertModule> make_nop_expert(ArchitectureArguments& arguments) {
  return std::make_unique<NopExpert>(arguments.hidden_dim());
}

std::unique_ptr<ExpertModule> make_det_dropout_expert(ArchitectureArguments& arguments) {
  return std::make_unique<DetDropoutExpert>(arguments.hidden_dim(), arguments.number("dropout", 0.2, 0, 0.95));
}

std::unique_ptr<ExpertModule> make_lstm_expert(ArchitectureArguments& arguments) {
  return std::make_unique<LstmExpert>(arguments.hidden_dim());
}

std::unique_ptr<ExpertModule> make_transformer_expert(ArchitectureArguments& arguments) {
  const auto width = arguments.hidden_dim();
  TransformerSizes sizes{.width = width,
                         .heads = arguments.integer("heads", default_heads(width), 1, width),
                         .feedforward = arguments.integer("feedforward", 4 * width, 1, 1 << 20),
                         .dropout = arguments.number("dropout", 0, 0, 0.95),
                         .padding_mask = arguments.integer("padding_mask", 0, 0, 1) == 1};
  if (width % sizes.heads != 0) {
    throw std::invalid_argument("heads=" + std::to_string(sizes.heads) + " does not divide hidden_dim " +
                                std::to_string(width));
  }
  return std::make_unique<TransformerExpert>(sizes);
}

}  // namespace dmoe::expert_server
