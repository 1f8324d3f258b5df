#include "expert_server/compute_threads.hpp"

#include <ATen/Parallel.h>

#include <dlfcn.h>

#include <algorithm>
#include <thread>

namespace dmoe::expert_server {
namespace {

// Found at run time: BLAS is an alternative that the administrator chooses, and need not be OpenBLAS.
void set_blas_threads(int threads) {
  using SetThreads = void (*)(int);
  static const auto set = reinterpret_cast<SetThreads>(::dlsym(RTLD_DEFAULT, "openblas_set_num_threads"));
  if (set != nullptr) set(threads);
}

}  // namespace

int effective_compute_threads(int requested) {
  if (requested > 0) return requested;
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

void use_compute_threads(int threads) {
  at::set_num_threads(threads);
  set_blas_threads(threads);
}

OneBlasThread::OneBlasThread(int threads_afterwards) : afterwards_(threads_afterwards) { set_blas_threads(1); }
OneBlasThread::~OneBlasThread() { set_blas_threads(afterwards_); }

}  // namespace dmoe::expert_server
