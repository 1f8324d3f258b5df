#include "expert_server/matrix_product.hpp"

#include <ATen/Parallel.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <c10/core/GradMode.h>

#include <dnnl_version.h>
#include <dnnl.hpp>

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string_view>

namespace dmoe::expert_server {
namespace {

using dnnl::matmul;
using dnnl::memory;

/// A shape of a product, and how it is to be computed.
struct Shape {
  std::int64_t rows;
  std::int64_t inner;
  std::int64_t columns;
  std::array<std::int64_t, 2> left_strides;
  std::array<std::int64_t, 2> right_strides;
  bool with_bias;
  int threads;  ///< A kernel is made for a number of threads.

  auto operator<=>(const Shape&) const = default;
};

std::array<std::int64_t, 2> strides_of(const at::Tensor& matrix) { return {matrix.stride(0), matrix.stride(1)}; }

bool is_dense(const at::Tensor& matrix) {
  return matrix.scalar_type() == at::kFloat && (matrix.is_contiguous() || matrix.t().is_contiguous());
}

memory::desc described(std::int64_t rows, std::int64_t columns, const std::array<std::int64_t, 2>& strides) {
  return {{rows, columns}, memory::data_type::f32, {strides[0], strides[1]}};
}

/// One for the process, and never destroyed: threads may outlive what has static storage.
const dnnl::engine& engine() {
  static const auto& cpu = *new dnnl::engine(dnnl::engine::kind::cpu, 0);
  return cpu;
}

/// A product of one shape. oneDNN keeps the machine code of many in a cache of its own.
struct Kernel {
  explicit Kernel(const Shape& shape)
      : left(described(shape.rows, shape.inner, shape.left_strides)),
        right(described(shape.inner, shape.columns, shape.right_strides)),
        bias(shape.with_bias ? described(1, shape.columns, {shape.columns, 1}) : memory::desc()),
        result(described(shape.rows, shape.columns, {shape.columns, 1})) {
#if DNNL_VERSION_MAJOR >= 3
    const auto found = shape.with_bias ? matmul::primitive_desc(engine(), left, right, bias, result)
                                       : matmul::primitive_desc(engine(), left, right, result);
#else
    const auto found = matmul::primitive_desc(
        shape.with_bias ? matmul::desc(left, right, bias, result) : matmul::desc(left, right, result), engine());
#endif
    // "brg…": blocks of small products, which begin without packing. The others are slower than a BLAS for few rows.
    if (std::string_view(found.impl_info_str()).starts_with("brg")) multiply = matmul(found);
  }

  memory::desc left;
  memory::desc right;
  memory::desc bias;
  memory::desc result;
  std::optional<matmul> multiply;  ///< Nothing: torch's product is better.
};

constexpr std::size_t kMaxKernels = 256;  ///< Of a thread.

const Kernel& kernel_for(const Shape& shape) {
  thread_local std::map<Shape, Kernel> kernels;
  const auto found = kernels.find(shape);
  if (found != kernels.end()) return found->second;
  if (kernels.size() >= kMaxKernels) kernels.clear();
  return kernels.emplace(shape, Kernel(shape)).first->second;
}

memory at_tensor(const memory::desc& description, const at::Tensor& tensor) {
  return {description, engine(), tensor.data_ptr()};
}

}  // namespace

at::Tensor matrix_product(const at::Tensor& left, const at::Tensor& right, const at::Tensor& bias) {
  const at::NoGradGuard no_grad;
  const bool with_bias = bias.defined();
  const auto by_torch = [&] { return with_bias ? at::addmm(bias, left, right) : at::mm(left, right); };
  const bool fits = is_dense(left) && is_dense(right) && left.size(1) == right.size(0) &&
                    (!with_bias || (bias.is_contiguous() && bias.scalar_type() == at::kFloat));
  if (!fits || left.numel() == 0 || right.numel() == 0) return by_torch();
  const int threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  const Shape shape{left.size(0), left.size(1), right.size(1), strides_of(left), strides_of(right), with_bias, threads};
  const auto& kernel = kernel_for(shape);
  if (!kernel.multiply) return by_torch();
  auto result = at::empty({left.size(0), right.size(1)}, left.options());
  std::unordered_map<int, memory> arguments{{DNNL_ARG_SRC, at_tensor(kernel.left, left)},
                                            {DNNL_ARG_WEIGHTS, at_tensor(kernel.right, right)},
                                            {DNNL_ARG_DST, at_tensor(kernel.result, result)}};
  if (with_bias) arguments.emplace(DNNL_ARG_BIAS, at_tensor(kernel.bias, bias));
  thread_local dnnl::stream stream(engine());
  kernel.multiply->execute(stream, arguments);
  stream.wait();
  return result;
}

}  // namespace dmoe::expert_server
