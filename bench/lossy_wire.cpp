#include "bench/lossy_wire.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <exception>
#include <fstream>
#include <random>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace dmoe::bench {
namespace {

using WireClock = std::chrono::steady_clock;

constexpr const char* kDevice = "wire";
constexpr int kQueuedPackets = 10'000;  ///< A sender is slowed by losses, not by this machine.
constexpr std::size_t kLargestPacket = 64UL * 1024;

[[noreturn]] void fail_wire(const char* what) {
  throw std::runtime_error(std::string("the lossy wire needs root and /dev/net/tun: ") + what + ": " +
                           std::strerror(errno));
}

class Descriptor {
 public:
  Descriptor() = default;
  Descriptor(int fd, const char* what) : fd_(fd) {
    if (fd < 0) fail_wire(what);
  }
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const noexcept { return fd_; }

 private:
  int fd_ = -1;
};

void set_address(ifreq& request, const char* text) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  ::inet_pton(AF_INET, text, &address.sin_addr);
  std::memcpy(&request.ifr_addr, &address, sizeof(address));
}

/// One host: its namespace, and the device through which its packets leave.
struct WireHost {
  Descriptor space;
  Descriptor device;
};

/// On a thread of its own, whose namespace is the new one.
WireHost make_host(const char* address, const std::string& congestion) {
  if (::unshare(CLONE_NEWNET) != 0) fail_wire("a network namespace");
  WireHost host{Descriptor(::open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC), "its namespace"),
                Descriptor(::open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC), "/dev/net/tun")};
  ifreq request{};
  std::strncpy(request.ifr_name, kDevice, IFNAMSIZ - 1);
  request.ifr_flags = IFF_TUN | IFF_NO_PI;
  if (::ioctl(host.device.get(), TUNSETIFF, &request) != 0) fail_wire("a device");
  const Descriptor control(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0), "a socket");
  set_address(request, address);
  if (::ioctl(control.get(), SIOCSIFADDR, &request) != 0) fail_wire("its address");
  set_address(request, "255.255.255.0");
  if (::ioctl(control.get(), SIOCSIFNETMASK, &request) != 0) fail_wire("its netmask");
  request.ifr_qlen = kQueuedPackets;
  if (::ioctl(control.get(), SIOCSIFTXQLEN, &request) != 0) fail_wire("its queue");
  request.ifr_flags = IFF_UP | IFF_RUNNING;
  if (::ioctl(control.get(), SIOCSIFFLAGS, &request) != 0) fail_wire("its start");
  if (!congestion.empty()) {
    std::ofstream setting("/proc/sys/net/ipv4/tcp_congestion_control");
    setting << congestion << std::flush;
    if (!setting) throw std::runtime_error("this kernel has no congestion control named " + congestion);
  }
  return host;
}

WireHost host_on_its_own_thread(const char* address, const std::string& congestion) {
  WireHost host;
  std::exception_ptr failure;
  std::thread([&] {
    try {
      host = make_host(address, congestion);
    } catch (...) {
      failure = std::current_exception();
    }
  }).join();
  if (failure) std::rethrow_exception(failure);
  return host;
}

}  // namespace

class LossyWire::Impl {
 public:
  explicit Impl(const WireConditions& conditions)
      : delay_(conditions.round_trip / 2),
        lost_(conditions.loss),
        random_(conditions.seed),
        hosts_{host_on_its_own_thread(kClientAddress, conditions.congestion),
               host_on_its_own_thread(kServerAddress, conditions.congestion)},
        thread_([this] { run(); }) {}
  ~Impl() {
    stopped_ = true;
    thread_.join();
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  int space(Host host) const { return hosts_[host == Host::kClient ? 0 : 1].space.get(); }

 private:
  struct Packet {
    WireClock::time_point due;
    std::vector<char> bytes;
  };

  void run() {
    std::vector<char> buffer(kLargestPacket);
    while (!stopped_) {
      std::array<pollfd, 2> ready{{{hosts_[0].device.get(), POLLIN, 0}, {hosts_[1].device.get(), POLLIN, 0}}};
      const auto wait = until_due();
      const timespec timeout{wait.count() / 1'000'000'000, wait.count() % 1'000'000'000};
      (void)::ppoll(ready.data(), ready.size(), &timeout, nullptr);
      for (std::size_t from = 0; from < 2; ++from) {
        if ((ready[from].revents & POLLIN) != 0) take(from, buffer);
      }
      for (std::size_t from = 0; from < 2; ++from) deliver(from);
    }
  }

  std::chrono::nanoseconds until_due() const {
    auto wait = std::chrono::nanoseconds(std::chrono::milliseconds(50));
    const auto now = WireClock::now();
    for (const auto& queue : queues_) {
      if (!queue.empty()) wait = std::min(wait, std::chrono::nanoseconds(queue.front().due - now));
    }
    return std::max(wait, std::chrono::nanoseconds(0));
  }

  /// Takes what a host sent; a share of it is gone.
  void take(std::size_t from, std::vector<char>& buffer) {
    constexpr int kAtOnce = 64;  // Then the other direction has its turn.
    for (int i = 0; i < kAtOnce; ++i) {
      const auto size = ::read(hosts_[from].device.get(), buffer.data(), buffer.size());
      if (size <= 0) return;
      if (std::uniform_real_distribution<>()(random_) < lost_) continue;
      queues_[from].push_back({WireClock::now() + delay_, {buffer.data(), buffer.data() + size}});
    }
  }

  void deliver(std::size_t from) {
    auto& queue = queues_[from];
    const auto now = WireClock::now();
    for (; !queue.empty() && queue.front().due <= now; queue.pop_front()) {
      const auto& bytes = queue.front().bytes;
      (void)!::write(hosts_[1 - from].device.get(), bytes.data(), bytes.size());  // A full host loses it, as ever.
    }
  }

  const WireClock::duration delay_;
  const double lost_;
  std::mt19937_64 random_;
  std::array<WireHost, 2> hosts_;
  std::array<std::deque<Packet>, 2> queues_;  ///< By sender.
  std::atomic<bool> stopped_{false};
  std::thread thread_;
};

LossyWire::LossyWire(const WireConditions& conditions) : impl_(std::make_unique<Impl>(conditions)) {}
LossyWire::~LossyWire() = default;

LossyWire::Stay::Stay(const LossyWire& wire, Host host)
    : before_(::open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC)) {
  if (before_ < 0 || ::setns(wire.impl_->space(host), CLONE_NEWNET) != 0) fail_wire("a change of host");
}

LossyWire::Stay::~Stay() {
  (void)::setns(before_, CLONE_NEWNET);
  ::close(before_);
}

}  // namespace dmoe::bench
