#include "dmoe/compute_team.hpp"

#include <ATen/Parallel.h>

#ifndef _OPENMP
#error "compile this file with OpenMP: without it nothing is set"
#endif
#include <omp.h>

namespace dmoe {

void set_compute_team(int threads) {
  (void)at::get_num_threads();  // ATen sets a thread's team on its first use, and would overwrite ours.
  omp_set_num_threads(threads);
}

}  // namespace dmoe
