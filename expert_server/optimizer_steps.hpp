// The arithmetic of one optimizer step over raw memory: one pass, every value read and written once.
#pragma once

#include "expert_server/few_rows.hpp"

#include <cstdint>

namespace dmoe::expert_server {

/// The factors of one Adam step, computed once per step in double.
struct AdamFactors {
  double scale;            ///< What the gradient is multiplied with (clipping).
  double coupled_decay;    ///< Times the weight, added to the gradient (Adam).
  double decoupled_decay;  ///< What the weight is multiplied with first (AdamW).
  double beta1;
  double beta2;
  double step_size;
  double root_correction;  ///< 1 / sqrt(1 - beta2^t)
  double epsilon;
};

/// Arrays of the same length that do not overlap.
template <class T>
struct AdamMemory {
  T* weight;
  const T* gradient;
  T* mean;
  T* square;
  T* largest;  ///< Null without AMSGrad.
};

struct SgdFactors {
  double scale;
  double decay;
  double rate;
  double momentum;
  bool nesterov;
  bool first;  ///< The velocity holds nothing yet.
};

template <class T>
struct SgdMemory {
  T* weight;
  const T* gradient;
  T* velocity;  ///< Null without momentum.
};

/// In double, where squares of finite floats cannot overflow: finite exactly when all values are. For doubles the sum
/// can overflow: a vector of norm above 1e154 counts as not finite. The same bits for any number of threads.
template <class T>
double squared_norm(const T* values, std::int64_t count);

/// Adam (Kingma and Ba 2015), AMSGrad (Reddi et al. 2018), AdamW (Loshchilov and Hutter 2019), as torch computes them.
/// Split over the calling thread's compute threads. For float and double.
template <class T>
void adam_step(const AdamMemory<T>& memory, std::int64_t count, const AdamFactors& factors);

template <class T>
void sgd_step(const SgdMemory<T>& memory, std::int64_t count, const SgdFactors& factors);

/// For a matrix whose gradient is a sum of outer products. Each row of it is worked out where it is used, so that it is
/// neither written to memory nor read from there, twice; `memory.gradient` is not used.
void adam_step(const AdamMemory<float>& memory, const OuterProducts& gradient, const AdamFactors& factors);
void sgd_step(const SgdMemory<float>& memory, const OuterProducts& gradient, const SgdFactors& factors);

/// The squared 2-norm of the sum, from products of rows with rows; and a bound that none of its elements, nor any part
/// of their sums, exceeds.
struct OuterNorm {
  double squared;
  double bound;
};
OuterNorm norm_of(const OuterProducts& gradient);

extern template double squared_norm(const float*, std::int64_t);
extern template double squared_norm(const double*, std::int64_t);
extern template void adam_step(const AdamMemory<float>&, std::int64_t, const AdamFactors&);
extern template void adam_step(const AdamMemory<double>&, std::int64_t, const AdamFactors&);
extern template void sgd_step(const SgdMemory<float>&, std::int64_t, const SgdFactors&);
extern template void sgd_step(const SgdMemory<double>&, std::int64_t, const SgdFactors&);

}  // namespace dmoe::expert_server
