#include "expert_server/optimizer_steps.hpp"

#include "expert_server/parallel_range.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace dmoe::expert_server {
namespace {

constexpr std::int64_t kGrain = 1 << 16;  ///< Elements one thread takes at a time.

constexpr std::int64_t kLanes = 8;  ///< Independent sums, so that the compiler may keep them in vector registers.

template <class T>
double range_squares(const T* values, std::int64_t count) {
  double lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      const double value = static_cast<double>(values[i + lane]);
      lanes[lane] += value * value;
    }
  }
  for (; i < count; ++i) lanes[0] += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

template <bool kAmsgrad, class T>
[[gnu::always_inline]] inline void adam_loop(const AdamMemory<T>& memory, const AdamFactors& factors,
                                             std::int64_t begin, std::int64_t end) {
  const T scale = static_cast<T>(factors.scale);
  const T decay = static_cast<T>(factors.coupled_decay);
  const T shrink = static_cast<T>(factors.decoupled_decay);
  const T beta1 = static_cast<T>(factors.beta1);
  const T beta2 = static_cast<T>(factors.beta2);
  const T rest1 = static_cast<T>(1 - factors.beta1);
  const T rest2 = static_cast<T>(1 - factors.beta2);
  const T step_size = static_cast<T>(factors.step_size);
  const T root_correction = static_cast<T>(factors.root_correction);
  const T epsilon = static_cast<T>(factors.epsilon);
  T* const __restrict__ weight = memory.weight;
  const T* const __restrict__ gradient = memory.gradient;
  T* const __restrict__ mean = memory.mean;
  T* const __restrict__ square = memory.square;
  T* const __restrict__ largest = memory.largest;
  for (std::int64_t i = begin; i < end; ++i) {
    const T g = gradient[i] * scale + decay * weight[i];
    const T m = beta1 * mean[i] + rest1 * g;
    const T v = beta2 * square[i] + rest2 * g * g;
    T top = v;
    if constexpr (kAmsgrad) {
      top = v > largest[i] ? v : largest[i];
      largest[i] = top;
    }
    mean[i] = m;
    square[i] = v;
    weight[i] = shrink * weight[i] - step_size * m / (std::sqrt(top) * root_correction + epsilon);
  }
}

template <class T>
using AdamRange = void (*)(const AdamMemory<T>&, const AdamFactors&, std::int64_t, std::int64_t);

template <bool kAmsgrad, class T>
void plain_adam(const AdamMemory<T>& memory, const AdamFactors& factors, std::int64_t begin, std::int64_t end) {
  adam_loop<kAmsgrad>(memory, factors, begin, end);
}

#if defined(__x86_64__)
template <bool kAmsgrad, class T>
__attribute__((target("avx2,fma"))) void avx2_adam(const AdamMemory<T>& memory, const AdamFactors& factors,
                                                   std::int64_t begin, std::int64_t end) {
  adam_loop<kAmsgrad>(memory, factors, begin, end);
}

template <bool kAmsgrad, class T>
AdamRange<T> best_adam() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? avx2_adam<kAmsgrad, T>
                                                                         : plain_adam<kAmsgrad, T>;
}
#else
template <bool kAmsgrad, class T>
AdamRange<T> best_adam() {
  return plain_adam<kAmsgrad, T>;
}
#endif

/// The loop for the processor at hand: square roots and divisions are what a small expert's step takes.
template <class T>
AdamRange<T> adam_range(bool amsgrad) {
  static const auto with = best_adam<true, T>();
  static const auto without = best_adam<false, T>();
  return amsgrad ? with : without;
}

double dot(const float* left, const float* right, std::int64_t count) {
  double lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += static_cast<double>(left[i + lane]) * static_cast<double>(right[i + lane]);
    }
  }
  for (; i < count; ++i) lanes[0] += static_cast<double>(left[i]) * static_cast<double>(right[i]);
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

/// Calls `step(first element, gradient of one row of the matrix)` for each row, split over the compute threads.
template <class Step>
void for_each_row(const OuterProducts& gradient, const Step& step) {
  parallel_range(gradient.outputs, 1 + kGrain / (gradient.inputs + 1), [&](std::int64_t begin, std::int64_t end) {
    thread_local std::vector<float> row;
    row.resize(static_cast<std::size_t>(gradient.inputs));
    for (auto output = begin; output < end; ++output) {
      outer_products_row(gradient, output, row.data());
      step(output * gradient.inputs, row.data());
    }
  });
}

/// The gradient with clipping and weight decay.
template <class T>
T decayed(T gradient, T weight, T scale, T decay) {
  return gradient * scale + decay * weight;
}

template <class T>
void sgd_range(const SgdMemory<T>& memory, const SgdFactors& factors, std::int64_t begin, std::int64_t end) {
  const T scale = static_cast<T>(factors.scale);
  const T decay = static_cast<T>(factors.decay);
  const T rate = static_cast<T>(factors.rate);
  const T kept = factors.first ? 0 : static_cast<T>(factors.momentum);
  // Nesterov looks one step of the velocity ahead: gradient + momentum * velocity.
  const T of_gradient = factors.nesterov ? 1 : 0;
  const T of_velocity = factors.nesterov ? static_cast<T>(factors.momentum) : 1;
  T* const __restrict__ weight = memory.weight;
  const T* const __restrict__ gradient = memory.gradient;
  T* const __restrict__ velocity = memory.velocity;
  if (velocity == nullptr) {
    for (std::int64_t i = begin; i < end; ++i) weight[i] -= rate * decayed(gradient[i], weight[i], scale, decay);
    return;
  }
  for (std::int64_t i = begin; i < end; ++i) {
    const T g = decayed(gradient[i], weight[i], scale, decay);
    const T speed = kept * velocity[i] + g;
    velocity[i] = speed;
    weight[i] -= rate * (of_gradient * g + of_velocity * speed);
  }
}

}  // namespace

template <class T>
double squared_norm(const T* values, std::int64_t count) {
  std::vector<double> sums(static_cast<std::size_t>((count + kGrain - 1) / kGrain));
  parallel_range(static_cast<std::int64_t>(sums.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    for (auto part = begin; part < end; ++part) {
      const auto first = part * kGrain;
      sums[static_cast<std::size_t>(part)] = range_squares(values + first, std::min(kGrain, count - first));
    }
  });
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

template <class T>
void adam_step(const AdamMemory<T>& memory, std::int64_t count, const AdamFactors& factors) {
  const auto range = adam_range<T>(memory.largest != nullptr);
  parallel_range(count, kGrain, [&](std::int64_t begin, std::int64_t end) { range(memory, factors, begin, end); });
}

template <class T>
void sgd_step(const SgdMemory<T>& memory, std::int64_t count, const SgdFactors& factors) {
  parallel_range(count, kGrain, [&](std::int64_t begin, std::int64_t end) { sgd_range(memory, factors, begin, end); });
}

void adam_step(const AdamMemory<float>& memory, const OuterProducts& gradient, const AdamFactors& factors) {
  const auto range = adam_range<float>(memory.largest != nullptr);
  for_each_row(gradient, [&](std::int64_t first, const float* row) {
    const AdamMemory<float> part{memory.weight + first, row, memory.mean + first, memory.square + first,
                                 memory.largest == nullptr ? nullptr : memory.largest + first};
    range(part, factors, 0, gradient.inputs);
  });
}

void sgd_step(const SgdMemory<float>& memory, const OuterProducts& gradient, const SgdFactors& factors) {
  for_each_row(gradient, [&](std::int64_t first, const float* row) {
    const SgdMemory<float> part{memory.weight + first, row,
                                memory.velocity == nullptr ? nullptr : memory.velocity + first};
    sgd_range(part, factors, 0, gradient.inputs);
  });
}

OuterNorm norm_of(const OuterProducts& gradient) {
  OuterNorm norm{0, 0};
  for (std::int64_t one = 0; one < gradient.rows; ++one) {
    const float* left = gradient.left + one * gradient.outputs;
    const float* right = gradient.right + one * gradient.inputs;
    for (std::int64_t two = 0; two <= one; ++two) {
      const double product = dot(left, gradient.left + two * gradient.outputs, gradient.outputs) *
                             dot(right, gradient.right + two * gradient.inputs, gradient.inputs);
      norm.squared += one == two ? product : 2 * product;
      if (one == two) norm.bound += std::sqrt(product);
    }
  }
  // What rounding leaves of rows that cancel each other. NaN stays.
  if (norm.squared < 0) norm.squared = 0;
  return norm;
}

template double squared_norm(const float*, std::int64_t);
template double squared_norm(const double*, std::int64_t);
template void adam_step(const AdamMemory<float>&, std::int64_t, const AdamFactors&);
template void adam_step(const AdamMemory<double>&, std::int64_t, const AdamFactors&);
template void sgd_step(const SgdMemory<float>&, std::int64_t, const SgdFactors&);
template void sgd_step(const SgdMemory<double>&, std::int64_t, const SgdFactors&);

}  // namespace dmoe::expert_server
