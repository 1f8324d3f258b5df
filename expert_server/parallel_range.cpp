#include "expert_server/parallel_range.hpp"

#include <ATen/Parallel.h>

#ifndef _OPENMP
#error "compile this file with OpenMP: without it every loop runs on one thread"
#endif

namespace dmoe::expert_server {

void parallel_range(std::int64_t count, std::int64_t grain,
                    const std::function<void(std::int64_t begin, std::int64_t end)>& body) {
  at::parallel_for(0, count, grain, body);
}

}  // namespace dmoe::expert_server
