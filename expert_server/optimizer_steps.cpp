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
void adam_range(const AdamMemory<T>& memory, const AdamFactors& factors, std::int64_t begin, std::int64_t end) {
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
  const auto range = memory.largest != nullptr ? adam_range<true, T> : adam_range<false, T>;
  parallel_range(count, kGrain, [&](std::int64_t begin, std::int64_t end) { range(memory, factors, begin, end); });
}

template <class T>
void sgd_step(const SgdMemory<T>& memory, std::int64_t count, const SgdFactors& factors) {
  parallel_range(count, kGrain, [&](std::int64_t begin, std::int64_t end) { sgd_range(memory, factors, begin, end); });
}

template double squared_norm(const float*, std::int64_t);
template double squared_norm(const double*, std::int64_t);
template void adam_step(const AdamMemory<float>&, std::int64_t, const AdamFactors&);
template void adam_step(const AdamMemory<double>&, std::int64_t, const AdamFactors&);
template void sgd_step(const SgdMemory<float>&, std::int64_t, const SgdFactors&);
template void sgd_step(const SgdMemory<double>&, std::int64_t, const SgdFactors&);

}  // namespace dmoe::expert_server
