// Products of float32 matrices by oneDNN, which comes with libtorch.
#pragma once

#include <ATen/core/Tensor.h>

namespace dmoe::expert_server {

/// left @ right, and `bias` [columns] added to each row if there is one, without grad, on the calling thread's compute
/// threads. Either matrix may be a transposed view: it is read as it lies. Debian's libtorch asks OpenBLAS for these
/// products, whose kernels use half of an AVX-512 processor, and for fewer than some hundred rows spend as much time
/// packing the weights as multiplying. On a processor without AVX-512 torch is asked.
/// @pre `left` [rows, inner], `right` [inner, columns]; on the CPU. May throw what torch or oneDNN throw.
at::Tensor matrix_product(const at::Tensor& left, const at::Tensor& right, const at::Tensor& bias = {});

}  // namespace dmoe::expert_server
