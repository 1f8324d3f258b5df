#include "expert_server/compute_threads.hpp"

#include <ATen/Parallel.h>

#include <dlfcn.h>

#include <algorithm>
#include <thread>

namespace dmoe::expert_server {

int effective_compute_threads(int requested) {
  if (requested > 0) return requested;
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

void use_compute_threads(int threads) {
  at::set_num_threads(threads);
  // Found at run time: BLAS is an alternative that the administrator chooses, and need not be OpenBLAS.
  using SetThreads = void (*)(int);
  if (auto* found = ::dlsym(RTLD_DEFAULT, "openblas_set_num_threads")) reinterpret_cast<SetThreads>(found)(threads);
}

}  // namespace dmoe::expert_server
