#include "expert_server/compute_threads.hpp"

#include <ATen/Parallel.h>

#include <dlfcn.h>

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <numeric>
#include <string>
#include <thread>

namespace dmoe::expert_server {
namespace {

// Found at run time: BLAS is an alternative that the administrator chooses, and need not be OpenBLAS.
void set_blas_threads(int threads) {
  using SetThreads = void (*)(int);
  static const auto set = reinterpret_cast<SetThreads>(::dlsym(RTLD_DEFAULT, "openblas_set_num_threads"));
  if (set != nullptr) set(threads);
}

/// Cores that the control group (version 2) of this process may use; 0: no limit, or none known.
int quota_cores() {
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  double quota = 0;
  double period = 0;
  if (!(file >> quota >> period) || period <= 0) return 0;  // "max 100000" is no number.
  return std::max(1, static_cast<int>(std::ceil(quota / period)));
}

double seconds_of(const timespec& time) {
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace

int effective_compute_threads(int requested) {
  if (requested > 0) return requested;
  const auto cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));  // Of the affinity mask.
  const auto quota = quota_cores();
  return quota > 0 ? std::min(cores, quota) : cores;
}

int ThreadChoice::observe(std::chrono::duration<double> time, double cores, double others) {
  const auto follow = [&](double& average, std::chrono::duration<double> memory) {
    average += (others - average) * (1 - std::exp(-time / memory));
  };
  follow(short_average_, kShort);
  follow(long_average_, kLong);
  const auto fitting = [&](double free, double share) { return static_cast<int>(std::floor(free + 1 - share)); };
  const int kept = fitting(cores - short_average_, kKept);
  const int taken = fitting(cores - std::max(short_average_, long_average_), kTaken);
  now_ = std::clamp(std::max(taken, std::min(now_, kept)), 1, most_);
  return now_;
}

ThreadGovernor::ThreadGovernor(int requested)
    : fixed_(requested > 0 || effective_compute_threads(requested) == 1),
      choice_(effective_compute_threads(requested)),
      last_(look()) {}

ThreadGovernor::Sample ThreadGovernor::look() {
  Sample sample;
  sample.time = std::chrono::steady_clock::now();
  // "cpu  user nice system idle iowait irq softirq steal …", in ticks.
  std::ifstream file("/proc/stat");
  std::string name;
  std::array<double, 8> ticks{};
  if (!(file >> name) || name != "cpu") return sample;
  for (auto& value : ticks) {
    if (!(file >> value)) return sample;
  }
  const auto idle = ticks[3] + ticks[4];
  const auto all = std::accumulate(ticks.begin(), ticks.end(), 0.0);
  sample.busy = (all - idle) / static_cast<double>(::sysconf(_SC_CLK_TCK));
  timespec own{};
  if (::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &own) != 0) return sample;
  sample.own = seconds_of(own);
  sample.cores = static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
  return sample;
}

int ThreadGovernor::threads() {
  if (fixed_ || std::chrono::steady_clock::now() - last_.time < kPeriod) return choice_.threads();
  const auto sample = look();
  if (sample.cores > 0 && last_.cores > 0) {
    const std::chrono::duration<double> time = sample.time - last_.time;
    const auto others = std::max(0.0, (sample.busy - last_.busy) - (sample.own - last_.own)) / time.count();
    choice_.observe(time, sample.cores, others);
  }
  last_ = sample;
  return choice_.threads();
}

bool ThreadGovernor::room_for_another() const noexcept {
  constexpr double kTolerated = 0.15;
  return !fixed_ && last_.cores > 0 && choice_.others() + choice_.threads() < last_.cores + kTolerated;
}

void use_compute_threads(int threads) {
  at::set_num_threads(threads);
  set_blas_threads(threads);
}

OneBlasThread::OneBlasThread(int threads_afterwards) : afterwards_(threads_afterwards) { set_blas_threads(1); }
OneBlasThread::~OneBlasThread() { set_blas_threads(afterwards_); }

}  // namespace dmoe::expert_server
