// Whether this machine's matrix products are as fast as they should be.
#pragma once

#include <string>

namespace dmoe::cli {

/// Below this the reference BLAS is at work, or the machine is overloaded: a tuned BLAS does at least ten times as much
/// on one core.
inline constexpr double kSlowGigaflops = 5;

/// The best of a few float32 products of two 512 × 512 matrices, in 10^9 operations per second. Takes about 20 ms with
/// a tuned BLAS, and at most a second with the reference one.
double measure_gigaflops();

/// A line that names the package to install when `gigaflops` is too low, else empty.
std::string slow_matrix_warning(double gigaflops);

/// Measures, and logs the warning if there is one.
void warn_of_slow_matrices();

}  // namespace dmoe::cli
