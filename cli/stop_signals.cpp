#include "cli/stop_signals.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <system_error>
#include <utility>

namespace dmoe::cli {
namespace {

sigset_t stop_signal_set() noexcept {
  sigset_t set{};
  sigemptyset(&set);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGTERM);
  return set;
}

void set_event(int descriptor) noexcept {
  const std::uint64_t one = 1;
  (void)!write(descriptor, &one, sizeof(one));
}

}  // namespace

void block_stop_signals() noexcept {
  const sigset_t set = stop_signal_set();
  (void)pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

StopSignals::StopSignals() {
  block_stop_signals();
  const sigset_t set = stop_signal_set();
  signals_ = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  stopped_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (signals_ < 0 || wake_ < 0 || stopped_ < 0) throw std::system_error(errno, std::generic_category(), "signalfd");
  thread_ = std::thread([this] { read_signals(); });
}

StopSignals::~StopSignals() {
  set_event(wake_);
  thread_.join();
  close(signals_);
  close(wake_);
  close(stopped_);
}

void StopSignals::read_signals() {
  std::array<pollfd, 2> fds{pollfd{signals_, POLLIN, 0}, pollfd{wake_, POLLIN, 0}};
  while (fds[1].revents == 0) {
    if (poll(fds.data(), fds.size(), -1) < 0) continue;  // EINTR: the mask leaves other signals to this thread.
    signalfd_siginfo info{};
    while (read(signals_, &info, sizeof(info)) == static_cast<ssize_t>(sizeof(info))) {
      const int signal = static_cast<int>(info.ssi_signo);
      if (requested()) _exit(128 + signal);  // The user insists: no destructor may hold this up.
      request(signal);
    }
  }
}

void StopSignals::request(int signal) {
  {
    const std::lock_guard lock(mutex_);
    int none = 0;
    if (!signal_.compare_exchange_strong(none, signal)) return;
    if (action_) action_();
  }
  set_event(stopped_);
  came_.notify_all();
}

void StopSignals::wait() {
  std::unique_lock lock(mutex_);
  came_.wait(lock, [this] { return requested(); });
}

bool StopSignals::wait_for(std::chrono::milliseconds time) {
  std::unique_lock lock(mutex_);
  return came_.wait_for(lock, time, [this] { return requested(); });
}

void StopSignals::on_stop(std::function<void()> action) {
  const std::lock_guard lock(mutex_);
  action_ = std::move(action);
  if (requested() && action_) action_();
}

}  // namespace dmoe::cli
