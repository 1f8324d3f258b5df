// How many threads one torch call may use.
#pragma once

namespace dmoe::expert_server {

/// `requested`, or one per core when it is 0.
int effective_compute_threads(int requested);

/// Sets torch's intra-op threads for the calling thread, and those of OpenBLAS, which keeps its own number.
/// Both are settings of the whole process in part: one device thread should own them.
void use_compute_threads(int threads);

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
