// SIGINT and SIGTERM as plain events on a thread of their own.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace dmoe::cli {

/// Waits for SIGINT or SIGTERM from construction to destruction. The first one asks for a graceful end; a second one
/// ends the process at once with 128 + its number (130, 143), whatever it is doing. One instance per process.
/// Thread-safe.
///
/// The handler only writes the signal's number to a pipe. Blocking the signals and reading a signalfd would be neater,
/// but BLAS libraries start threads before `main`, which do not block them and would take the default action: death.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  /// Whether the first signal came.
  bool requested() const noexcept { return signal_.load() != 0; }
  /// The first signal's number; 0 before it.
  int signal() const noexcept { return signal_.load(); }

  /// Returns once the first signal came, or request() was called.
  void wait();
  /// The same, but at most this long. @return requested().
  bool wait_for(std::chrono::milliseconds time);
  /// Readable from the first signal on, for ever; for poll(2). Owned by this object.
  int descriptor() const noexcept { return stopped_; }

  /// Runs `action` at the first signal, on the signal thread (at once, on this one, if it already came). Must not
  /// block. An empty function clears it; after that the old one does not run any more.
  void on_stop(std::function<void()> action);

  /// As if the first signal had come: lets another reason end what waits.
  void request(int signal);

 private:
  void read_signals();

  int signals_ = -1;  // The pipe's end that the handler's numbers come out of.
  int wake_ = -1;     // eventfd: ends the thread.
  int stopped_ = -1;  // eventfd: set by the first signal, never read.
  std::atomic<int> signal_{0};
  std::mutex mutex_;
  std::condition_variable came_;
  std::function<void()> action_;  // Guarded by mutex_.
  std::thread thread_;            // Last: starts when all else exists.
};

}  // namespace dmoe::cli
