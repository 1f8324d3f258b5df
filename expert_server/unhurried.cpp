#include "expert_server/unhurried.hpp"

#include <sys/resource.h>
#include <unistd.h>

#include <future>

namespace dmoe::expert_server {
namespace {

constexpr int kNice = 5;

/// Linux keeps the nice value per thread.
void lower_own_priority() {
  const auto thread = static_cast<id_t>(::gettid());
  if (::getpriority(PRIO_PROCESS, thread) < kNice) (void)::setpriority(PRIO_PROCESS, thread, kNice);
}

}  // namespace

void run_unhurried(const std::function<void()>& work) {
  std::async(std::launch::async, [&work] {
    lower_own_priority();
    work();
  }).get();
}

}  // namespace dmoe::expert_server
