// Linear layers for a handful of rows, where the time goes into reading the weights.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace dmoe::expert_server {

inline constexpr std::int64_t kFewRows = 8;  ///< Above it a BLAS, which packs the weights first, is as fast.

/// Whether `few_rows_linear` should be used for `x` on this thread: 1 to kFewRows contiguous float32 rows on the CPU,
/// without grad, unless a FewRowsMode says no.
bool few_rows(const at::Tensor& x);

/// x @ weight^T + bias. Reads each weight once, straight from where it lies; split over the calling thread's compute
/// threads. A row's result does not depend on the other rows, nor on how many there are.
/// @pre few_rows(x); `weight` [outputs, inputs] and `bias` [outputs] are contiguous float32.
at::Tensor few_rows_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

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
