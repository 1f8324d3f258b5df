// Backward and the optimizer's step of a Linear for few rows, where the time goes into reading and writing weights.
// Private to expert_server/.
#pragma once

#include "expert_server/optimizer_steps.hpp"
#include "expert_server/parameter_gradient.hpp"

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace dmoe::expert_server {

/// An expert that can back-propagate few rows without autograd, whose many small operations cost more than their
/// arithmetic then.
class FewRowsTrainable {
 public:
  struct Gradients {
    std::vector<at::Tensor> inputs;             ///< As ExpertBackend::backward gives them.
    std::vector<ParameterGradient> parameters;  ///< In the order of ExpertModule::parameters().
  };

  virtual ~FewRowsTrainable() = default;
  /// Empty: not for these inputs. @pre the inputs fit the schema; `grad_outputs` have the outputs' shapes.
  virtual std::optional<Gradients> few_rows_backward(const std::vector<at::Tensor>& inputs,
                                                     const std::vector<at::Tensor>& grad_outputs) const = 0;
};

/// Whether these functions should be used for `x` and a weight of `weights` numbers on this thread, without grad: as
/// few_rows says, up to kFewCachedRows rows when the weight stays in a core's cache, where it is read again for every
/// kFewRows of them.
bool few_cached_rows(const at::Tensor& x, std::int64_t weights);
inline constexpr std::int64_t kFewCachedRows = 32;
inline constexpr std::int64_t kCachedWeights = 1 << 18;

/// x @ weight^T + bias, as few_rows_linear, for any number of rows.
at::Tensor few_rows_apply(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

/// gradient @ weight: what a Linear's output gradient [rows, outputs] is for its input, [rows, inputs]. Split over the
/// calling thread's compute threads.
at::Tensor few_rows_back(const at::Tensor& gradient, const at::Tensor& weight);

/// The squared 2-norm of left^T · right, without computing it: Σ_rs (left left^T)_rs (right right^T)_rs. In double; not
/// finite when a value is not.
double squared_norm(const at::Tensor& left, const at::Tensor& right);

/// adam_step with the gradient left^T · right: each number of the gradient lives in a register or the first cache only.
/// @param memory its `gradient` is not used.
void adam_step(const AdamMemory<float>& memory, const at::Tensor& left, const at::Tensor& right,
               const AdamFactors& factors);

/// relu(LayerNorm(x)), and what its backward needs.
struct NormedRows {
  at::Tensor output;      ///< [rows, width]
  at::Tensor normalized;  ///< [rows, width]: (x - mean) / deviation
  at::Tensor deviation;   ///< [rows]: sqrt(variance + epsilon)
};
NormedRows few_rows_norm_relu(at::Tensor x, const at::Tensor& weight, const at::Tensor& bias, double epsilon);

/// What the output's gradient is for its x, weight and bias. Overwrites `gradient`, which becomes that of x.
struct NormGradients {
  at::Tensor weight;
  at::Tensor bias;
};
NormGradients few_rows_norm_relu_back_(at::Tensor& gradient, const NormedRows& rows, const at::Tensor& weight);

}  // namespace dmoe::expert_server
