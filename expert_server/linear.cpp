#include "expert_server/linear.hpp"

#include "expert_server/few_rows.hpp"
#include "expert_server/matrix_product.hpp"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>
#include <torch/utils.h>

namespace dmoe::expert_server {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// @param x  [rows, inputs], contiguous float32 on the CPU. Without grad.
at::Tensor product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (x.size(0) > kFewRows) return matrix_product(x, weight.t(), bias);
  return few_rows(x) ? few_rows_linear(x, weight, bias) : at::linear(x, weight, bias);
}

class LinearFunction : public torch::autograd::Function<LinearFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& bias) {
    context->save_for_backward({x, weight});
    context->saved_data["to_input"] = x.requires_grad();
    context->saved_data["to_weight"] = weight.requires_grad();
    context->saved_data["to_bias"] = bias.requires_grad();
    return product(x, weight, bias);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const auto gradient = gradients[0].contiguous();
    variable_list found(3);
    if (context->saved_data["to_input"].toBool()) found[0] = apply_linear_backward(gradient, saved[1]);
    if (context->saved_data["to_weight"].toBool()) found[1] = matrix_product(gradient.t(), saved[0]);
    if (context->saved_data["to_bias"].toBool()) found[2] = gradient.sum(0);
    return found;
  }
};

bool is_plain(const at::Tensor& tensor) { return tensor.scalar_type() == at::kFloat && tensor.device().is_cpu(); }

}  // namespace

at::Tensor apply_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const auto inputs = weight.size(1);
  const bool fits = is_plain(x) && is_plain(weight) && x.dim() >= 2 && x.size(-1) == inputs && x.numel() > 0;
  if (!fits) return at::linear(x, weight, bias);
  const auto rows = x.reshape({-1, inputs}).contiguous();
  const bool differentiable =
      at::GradMode::is_enabled() && (rows.requires_grad() || weight.requires_grad() || bias.requires_grad());
  const auto y = differentiable ? LinearFunction::apply(rows, weight, bias) : product(rows, weight, bias);
  auto sizes = x.sizes().vec();
  sizes.back() = weight.size(0);
  return y.view(sizes);
}

at::Tensor apply_linear_backward(const at::Tensor& gradient, const at::Tensor& weight) {
  if (few_rows(gradient)) return few_rows_linear_backward(gradient, weight);
  return gradient.size(0) > kFewRows ? matrix_product(gradient, weight) : at::mm(gradient, weight);
}

}  // namespace dmoe::expert_server
