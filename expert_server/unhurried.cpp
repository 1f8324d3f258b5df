#include "expert_server/unhurried.hpp"

#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <future>

namespace dmoe::expert_server {
namespace {

constexpr int kNice = 10;

/// Linux keeps the nice value and the policy per thread, and passes them on to threads that it starts. A batch thread
/// does not interrupt the others when it wakes up, as one that waits for a disk would again and again.
void lower_own_priority() {
  const sched_param none{};
  (void)::pthread_setschedparam(::pthread_self(), SCHED_BATCH, &none);
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
