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

/// Chooses a number of compute threads from what other processes do, slowly enough not to follow each of their pauses:
/// programs that share a machine would otherwise all take the core that one of them left for a moment. Not thread-safe.
class ThreadChoice {
 public:
  /// Begins with `most` threads.
  explicit ThreadChoice(int most) noexcept : most_(most), now_(most) {}

  int threads() const noexcept { return now_; }
  double others() const noexcept { return long_average_; }  ///< Cores that they kept busy over the last seconds.
  /// During the last `time`, others kept `others` of `cores` busy on average.    @return threads from now on.
  int observe(std::chrono::duration<double> time, double cores, double others);

 private:
  static constexpr std::chrono::duration<double> kShort{0.3};  ///< Memory of the average that takes threads away.
  static constexpr std::chrono::duration<double> kLong{2.0};   ///< And of the one that must agree to a thread more.
  static constexpr double kKept = 0.5;   ///< A thread is kept while this much of its core is free …
  static constexpr double kTaken = 0.8;  ///< … and one more is taken when this much is.

  const int most_;
  int now_;
  double short_average_ = 0;
  double long_average_ = 0;
};

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
  /// Whether one thread more would have to share its core with one busy stranger at most.
  bool room_for_another() const noexcept;

 private:
  static constexpr std::chrono::milliseconds kPeriod{100};

  struct Sample {
    std::chrono::steady_clock::time_point time;
    double busy = 0;  ///< Seconds of all cores together, since the machine started.
    double own = 0;   ///< Of those, this process's.
    int cores = 0;    ///< 0: the machine does not tell.
  };
  static Sample look();

  const bool fixed_;
  ThreadChoice choice_;
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
