#include "cli/stop_signals.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <system_error>
#include <utility>

namespace dmoe::cli {
namespace {

std::atomic<int> handler_pipe{-1};  // Where the handler writes; handlers take no arguments of ours.
static_assert(std::atomic<int>::is_always_lock_free);

extern "C" void forward_stop_signal(int signal) {
  const int saved = errno;
  const auto number = static_cast<std::uint8_t>(signal);
  (void)!write(handler_pipe.load(), &number, 1);
  errno = saved;
}

void set_handler(void (*handler)(int)) noexcept {
  struct sigaction action {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (const int signal : {SIGINT, SIGTERM}) (void)sigaction(signal, &action, nullptr);
}

void set_event(int descriptor) noexcept {
  const std::uint64_t one = 1;
  (void)!write(descriptor, &one, sizeof(one));
}

}  // namespace

StopSignals::StopSignals() {
  std::array<int, 2> ends{-1, -1};
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  stopped_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK) != 0 || wake_ < 0 || stopped_ < 0) {
    throw std::system_error(errno, std::generic_category(), "cannot wait for signals");
  }
  signals_ = ends[0];
  handler_pipe.store(ends[1]);
  thread_ = std::thread([this] { read_signals(); });
  set_handler(&forward_stop_signal);
}

StopSignals::~StopSignals() {
  set_handler(SIG_DFL);
  set_event(wake_);
  thread_.join();
  close(signals_);
  close(handler_pipe.exchange(-1));
  close(wake_);
  close(stopped_);
}

void StopSignals::read_signals() {
  std::array<pollfd, 2> fds{pollfd{signals_, POLLIN, 0}, pollfd{wake_, POLLIN, 0}};
  while (fds[1].revents == 0) {
    if (poll(fds.data(), fds.size(), -1) < 0) continue;  // EINTR
    std::uint8_t number = 0;
    while (read(signals_, &number, 1) == 1) {
      if (requested()) _exit(128 + number);  // The user insists: no destructor may hold this up.
      request(number);
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
