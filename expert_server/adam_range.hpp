// Adam over a range of numbers, to be compiled into loops for several instruction sets. Private to expert_server/.
#pragma once

#include "expert_server/optimizer_steps.hpp"

#include <cmath>
#include <cstdint>

namespace dmoe::expert_server {

/// The step of elements begin … end. Vectorizes where errno of sqrt does not count (dmoe_vectorize).
template <bool kAmsgrad, class T>
[[gnu::always_inline]] inline void adam_range(const AdamMemory<T>& memory, const AdamFactors& factors,
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

}  // namespace dmoe::expert_server
