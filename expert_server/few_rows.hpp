// Linear layers for a handful of rows, where the time goes into reading the weights: there, back, and the gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace dmoe::expert_server {

inline constexpr std::int64_t kFewRows = 16;  ///< Above it a BLAS, which packs the weights first, is as fast.

/// Whether `few_rows_linear` should be used for `x` on this thread: 1 to kFewRows contiguous float32 rows on the CPU,
/// without grad, unless a FewRowsMode says no.
bool few_rows(const at::Tensor& x);

/// The same for any number of rows.
bool few_rows_allowed(const at::Tensor& x);

/// x @ weight^T + bias. Reads each weight once, straight from where it lies; split over the calling thread's compute
/// threads. A row's result does not depend on the other rows, nor on how many there are.
/// @pre few_rows(x); `weight` [outputs, inputs] and `bias` [outputs] are contiguous float32.
at::Tensor few_rows_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

/// gradient @ weight, [rows, inputs]: the way back to a linear layer's input, likewise.
/// @pre few_rows(gradient); `weight` [outputs, inputs] is contiguous float32.
at::Tensor few_rows_linear_backward(const at::Tensor& gradient, const at::Tensor& weight);

/// Row `output` of a weight's gradient: into[i] = sum over r of left[r * outputs + output] * right[r * inputs + i].
struct OuterProducts {
  const float* left;   ///< [rows, outputs]
  const float* right;  ///< [rows, inputs]
  std::int64_t rows;
  std::int64_t outputs;
  std::int64_t inputs;
};
void outer_products_row(const OuterProducts& products, std::int64_t output, float* into);

/// Allows or forbids few_rows on the calling thread until destruction. Allowed by default.
class FewRowsMode {
 public:
  explicit FewRowsMode(bool allowed) noexcept;
  ~FewRowsMode();
  FewRowsMode(const FewRowsMode&) = delete;
  FewRowsMode& operator=(const FewRowsMode&) = delete;

 private:
  bool before_;
};

}  // namespace dmoe::expert_server
