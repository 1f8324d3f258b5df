// The paper's feed-forward block, with a way back of its own for batches of few rows.
#include "expert_server/builtin_experts.hpp"
#include "expert_server/few_rows.hpp"
#include "expert_server/fresh_weights.hpp"
#include "expert_server/layer_norm_relu.hpp"
#include "expert_server/linear.hpp"
#include "expert_server/torch_expert.hpp"

#include <torch/nn/modules/normalization.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <utility>

namespace dmoe::expert_server {
namespace {

/// Rows up to which the gradients of weights stay sums of outer products: above it, working them out for each step
/// costs as much as reading them would.
constexpr std::int64_t kOuterRows = 32;

at::Tensor through(const FreshLinear& layer, const at::Tensor& x) {
  return apply_linear(x, layer->weight, layer->bias);
}

at::Tensor activate(torch::nn::LayerNorm& norm, at::Tensor x) {
  // In place: LayerNorm's backward needs its input, not its output.
  if (at::GradMode::is_enabled() || !x.device().is_cpu()) return norm(x).relu_();
  layer_norm_relu_(x, norm->weight, norm->bias, norm->options.eps());
  return x;
}

/// A linear layer and what follows it.
struct Stage {
  Stage(std::int64_t inputs, std::int64_t outputs)
      : linear(inputs, outputs), norm(torch::nn::LayerNormOptions({outputs})) {}
  FreshLinear linear;
  torch::nn::LayerNorm norm;
};

/// What a stage's way back needs.
struct StagePass {
  at::Tensor input;
  at::Tensor normalized;
  NormalizedRelu there;
};

StagePass pass_through(const Stage& stage, const at::Tensor& x) {
  auto z = through(stage.linear, x);
  auto there = layer_norm_relu_keeping_(z, stage.norm->weight, stage.norm->bias, stage.norm->options.eps());
  return {x, std::move(z), std::move(there)};
}

ParameterGradient outer_gradient(const at::Tensor& gradient, const at::Tensor& input) { return {{}, gradient, input}; }
ParameterGradient dense_gradient(const at::Tensor& gradient) { return {gradient, {}, {}}; }

class FfnExpert final : public TorchExpert {
 public:
  explicit FfnExpert(std::int64_t h) : first_(h, 4 * h), second_(4 * h, 4 * h), last_(4 * h, h) {
    schema_.inputs = schema_.outputs = {{at::kFloat, {h}}};
    holder_.register_module("first", first_.linear);
    holder_.register_module("first_norm", first_.norm);
    holder_.register_module("second", second_.linear);
    holder_.register_module("second_norm", second_.norm);
    holder_.register_module("third", last_);
  }

  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs, at::Generator& /*generator*/) override {
    auto inner = activate(first_.norm, through(first_.linear, inputs[0]));
    inner = activate(second_.norm, through(second_.linear, inner));
    auto output = through(last_, inner);
    return {output.add_(inputs[0])};
  }

  std::optional<ExpertGradients> backward(const std::vector<at::Tensor>& inputs,
                                          const std::vector<at::Tensor>& grad_outputs, bool with_parameters) override {
    const at::NoGradGuard no_grad;
    const auto& x = inputs[0];
    if (!few_rows_allowed(x) || x.size(0) > kOuterRows) return std::nullopt;
    const auto first = pass_through(first_, x);
    const auto second = pass_through(second_, first.there.output);
    const auto gradient = grad_outputs[0].contiguous();
    ExpertGradients found;
    auto& parameters = found.parameters;
    if (with_parameters) parameters.resize(10);
    auto back = apply_linear_backward(gradient, last_->weight);
    if (with_parameters) {
      parameters[8] = outer_gradient(gradient, second.there.output);
      parameters[9] = dense_gradient(gradient.sum(0));
    }
    back = back_through(second_, second, std::move(back), with_parameters ? &parameters[4] : nullptr);
    back = back_through(first_, first, std::move(back), with_parameters ? &parameters[0] : nullptr);
    found.inputs = {back.add_(gradient)};
    return found;
  }

 private:
  /// `gradient`: with respect to the stage's output. `parameters`: where those of its weight, bias, and norm go, in
  /// this order, or null.    @return that with respect to its input.
  static at::Tensor back_through(const Stage& stage, const StagePass& pass, at::Tensor gradient,
                                 ParameterGradient* parameters) {
    auto weight_gradient = at::empty_like(stage.norm->weight);
    auto bias_gradient = at::empty_like(stage.norm->bias);
    layer_norm_relu_backward_(gradient, pass.normalized, pass.there, stage.norm->weight, weight_gradient,
                              bias_gradient);
    auto back = apply_linear_backward(gradient, stage.linear->weight);
    if (parameters != nullptr) {
      parameters[0] = outer_gradient(gradient, pass.input);
      parameters[1] = dense_gradient(gradient.sum(0));
      parameters[2] = dense_gradient(weight_gradient);
      parameters[3] = dense_gradient(bias_gradient);
    }
    return back;
  }

  Stage first_, second_;
  FreshLinear last_;
};

}  // namespace

std::unique_ptr<ExpertModule> make_ffn_expert(ArchitectureArguments& arguments) {
  return std::make_unique<FfnExpert>(arguments.hidden_dim());
}

}  // namespace dmoe::expert_server
