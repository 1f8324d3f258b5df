// How many threads one torch call may use.
#pragma once

#include <chrono>

namespace dmoe::expert_server {

/// `requested`, or when it is 0 one per core that this process may use: its affinity mask and its control group's quota
/// count. The most that a ThreadGovernor gives.
int effective_compute_threads(int requested);

/// Sets torch's intra-op threads for the calling thread, and those of OpenBLAS, which keeps its own number.
/// Both are settings of the whole process in part: one device thread should own them.
void use_compute_threads(int threads);

/// How many compute threads this process should use now, on a machine that it shares.
///
/// A parallel loop ends when its last thread does, and the others spin until then: with more threads than free cores a
/// batch takes as many scheduler slices as it has loops. Four servers of two threads each and a trainer on two cores
/// were 15 to 20 times slower than with one thread each. So: as many threads as cores that others leave free, measured
/// over the last moments. Not thread-safe.
class ThreadGovernor {
 public:
  /// `requested` above 0: always that many.
  explicit ThreadGovernor(int requested);

  /// To be called before a batch; looks at the machine at most every kPeriod.
  int threads();

  /// Threads for `cores` of which other processes keep `others` busy on average.
  static int fitting(int most, double cores, double others);

 private:
  static constexpr std::chrono::milliseconds kPeriod{100};
  static constexpr std::chrono::seconds kLongest{3};  ///< A server that slept longer than that looks anew.

  struct Sample {
    std::chrono::steady_clock::time_point time;
    double busy = 0;  ///< Seconds of all cores together, since the machine started.
    double own = 0;   ///< Of those, this process's.
    int cores = 0;    ///< 0: the machine does not tell.
  };
  static Sample look();

  const int most_;
  const bool fixed_;
  int now_;
  Sample last_;
};

/// OpenBLAS computes on the calling thread alone until destruction: several threads are about to ask it for small
/// products at once, and its own pool would make them queue. For the thread that called use_compute_threads.
class OneBlasThread {
 public:
  explicit OneBlasThread(int threads_afterwards);
  ~OneBlasThread();
  OneBlasThread(const OneBlasThread&) = delete;
  OneBlasThread& operator=(const OneBlasThread&) = delete;

 private:
  int afterwards_;
};

}  // namespace dmoe::expert_server
