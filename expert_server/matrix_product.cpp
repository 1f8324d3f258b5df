#include "expert_server/matrix_product.hpp"

#include <ATen/Parallel.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <c10/core/GradMode.h>

#include <dnnl_version.h>
#include <dnnl.hpp>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <unordered_map>

namespace dmoe::expert_server {
namespace {

using dnnl::matmul;
using dnnl::memory;

bool has_avx512() {
  static const bool has = dnnl::get_effective_cpu_isa() >= dnnl::cpu_isa::avx512_core;
  return has;
}

/// How a matrix lies, as a BLAS calls it.
struct Layout {
  char transposed;  ///< 'N' or 'T'
  std::int64_t stride;
};

Layout layout_of(const at::Tensor& matrix) {
  return matrix.is_contiguous() ? Layout{'N', matrix.size(1)} : Layout{'T', matrix.size(0)};
}

bool is_dense(const at::Tensor& matrix) {
  return matrix.scalar_type() == at::kFloat && (matrix.is_contiguous() || matrix.t().is_contiguous());
}

// ---- Rows times transposed weights, where oneDNN's sgemm would pack the weights first: its blocked matmul does not.

constexpr std::int64_t kPackedInner = 256;   ///< Up to here packing costs little, …
constexpr std::int64_t kPackedRows = 1'024;  ///< … and from here on it does not matter.
constexpr std::int64_t kFewestRows = 16;

/// The most rows up to `rows` that there is a kernel for: each is some hundred KiB of machine code, so there are
/// multiples of 16 up to 128, and four sizes to each power of two above.
std::int64_t rows_at_once(std::int64_t rows) {
  if (rows < kFewestRows) return rows;
  const auto power = static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(rows)));
  const auto step = std::max(kFewestRows, power / 4);
  return rows / step * step;
}

struct Shape {
  std::int64_t rows;
  std::int64_t inner;
  std::int64_t columns;
  bool with_bias;
  int threads;  ///< A kernel is made for a number of threads.

  auto operator<=>(const Shape&) const = default;
};

/// One for the process, and never destroyed: threads may outlive what has static storage.
const dnnl::engine& engine() {
  static const auto& cpu = *new dnnl::engine(dnnl::engine::kind::cpu, 0);
  return cpu;
}

memory::desc described(std::int64_t rows, std::int64_t columns, memory::format_tag layout) {
  return {{rows, columns}, memory::data_type::f32, layout};
}

struct Kernel {
  explicit Kernel(const Shape& shape)
      : left(described(shape.rows, shape.inner, memory::format_tag::ab)),
        right(described(shape.inner, shape.columns, memory::format_tag::ba)),
        bias(shape.with_bias ? described(1, shape.columns, memory::format_tag::ab) : memory::desc()),
        result(described(shape.rows, shape.columns, memory::format_tag::ab)) {
#if DNNL_VERSION_MAJOR >= 3
    multiply = matmul(shape.with_bias ? matmul::primitive_desc(engine(), left, right, bias, result)
                                      : matmul::primitive_desc(engine(), left, right, result));
#else
    multiply = matmul(matmul::primitive_desc(
        shape.with_bias ? matmul::desc(left, right, bias, result) : matmul::desc(left, right, result), engine()));
#endif
  }

  memory::desc left;
  memory::desc right;
  memory::desc bias;
  memory::desc result;
  matmul multiply;
};

constexpr std::size_t kMaxKernels = 64;  ///< Of a thread.
constexpr int kMaxCached = 128;          ///< In oneDNN's own cache, of all threads: 1,024 would be a GiB or two.

const Kernel& kernel_for(const Shape& shape) {
  static const bool bounded = (dnnl::set_primitive_cache_capacity(kMaxCached), true);
  (void)bounded;
  thread_local std::map<Shape, Kernel> kernels;
  const auto found = kernels.find(shape);
  if (found != kernels.end()) return found->second;
  if (kernels.size() >= kMaxKernels) kernels.clear();
  return kernels.emplace(shape, Kernel(shape)).first->second;
}

/// @param weight  [columns, inner], contiguous, as all are.
void multiply_blocked(const at::Tensor& left, const at::Tensor& weight, const at::Tensor& bias, at::Tensor& result) {
  const auto inner = weight.size(1);
  const auto columns = weight.size(0);
  const int threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  thread_local dnnl::stream stream(engine());
  for (std::int64_t row = 0, count = 0; row < left.size(0); row += count) {
    count = rows_at_once(left.size(0) - row);
    const Shape shape{count, inner, columns, bias.defined(), threads};
    const auto& kernel = kernel_for(shape);
    const auto at = [](const memory::desc& description, const at::Tensor& tensor, std::int64_t first) {
      return memory(description, engine(), tensor.data_ptr<float>() + first);
    };
    std::unordered_map<int, memory> arguments{{DNNL_ARG_SRC, at(kernel.left, left, row * inner)},
                                              {DNNL_ARG_WEIGHTS, at(kernel.right, weight, 0)},
                                              {DNNL_ARG_DST, at(kernel.result, result, row * columns)}};
    if (bias.defined()) arguments.emplace(DNNL_ARG_BIAS, at(kernel.bias, bias, 0));
    kernel.multiply.execute(stream, arguments);
    stream.wait();
  }
}

}  // namespace

at::Tensor matrix_product(const at::Tensor& left, const at::Tensor& right, const at::Tensor& bias) {
  const at::NoGradGuard no_grad;
  const bool fits = has_avx512() && is_dense(left) && is_dense(right) && left.size(1) == right.size(0) &&
                    (!bias.defined() || (bias.is_contiguous() && bias.scalar_type() == at::kFloat));
  if (!fits || left.numel() == 0 || right.numel() == 0) {
    return bias.defined() ? at::addmm(bias, left, right) : at::mm(left, right);
  }
  const auto rows = left.size(0);
  const auto inner = left.size(1);
  const auto columns = right.size(1);
  const auto a = layout_of(left);
  const auto b = layout_of(right);
  auto result = at::empty({rows, columns}, left.options());
  if (a.transposed == 'N' && b.transposed == 'T' && inner > kPackedInner && rows < kPackedRows) {
    multiply_blocked(left, right.t(), bias, result);
    return result;
  }
  if (bias.defined()) result.copy_(bias.expand({rows, columns}));
  const auto done =
      dnnl_sgemm(a.transposed, b.transposed, rows, columns, inner, 1, left.data_ptr<float>(), a.stride,
                 right.data_ptr<float>(), b.stride, bias.defined() ? 1 : 0, result.data_ptr<float>(), columns);
  if (done != dnnl_success) throw std::runtime_error("oneDNN does not multiply these matrices");
  return result;
}

}  // namespace dmoe::expert_server
