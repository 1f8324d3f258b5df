#include "cli/process_setup.hpp"

#include <sys/resource.h>

#include <csignal>

namespace dmoe::cli {

std::uint64_t raise_file_limit() noexcept {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 0;
  if (limit.rlim_cur < limit.rlim_max) {
    const rlimit raised{limit.rlim_max, limit.rlim_max};
    if (setrlimit(RLIMIT_NOFILE, &raised) == 0) limit = raised;
  }
  return limit.rlim_cur;
}

void ignore_broken_pipes() noexcept { (void)std::signal(SIGPIPE, SIG_IGN); }

}  // namespace dmoe::cli
