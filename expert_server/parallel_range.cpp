#include "expert_server/parallel_range.hpp"

#include <ATen/Parallel.h>

#include <algorithm>
#include <thread>
#include <vector>

#ifndef _OPENMP
#error "compile this file with OpenMP: without it every loop runs on one thread"
#endif

namespace dmoe::expert_server {

#ifdef __SANITIZE_THREAD__
/// On threads that the sanitizer knows: it does not see the barriers of libgomp, and would call each loop a race.
void parallel_range(std::int64_t count, std::int64_t grain,
                    const std::function<void(std::int64_t begin, std::int64_t end)>& body) {
  const auto parts =
      std::min<std::int64_t>(at::get_num_threads(), (count + grain - 1) / std::max<std::int64_t>(grain, 1));
  if (parts <= 1) return count > 0 ? body(0, count) : void();
  std::vector<std::jthread> threads;
  for (std::int64_t part = 0; part < parts; ++part) {
    threads.emplace_back([&, part] { body(count * part / parts, count * (part + 1) / parts); });
  }
}
#else
void parallel_range(std::int64_t count, std::int64_t grain,
                    const std::function<void(std::int64_t begin, std::int64_t end)>& body) {
  at::parallel_for(0, count, grain, body);
}
#endif

}  // namespace dmoe::expert_server
