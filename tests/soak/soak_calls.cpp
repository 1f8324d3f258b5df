// a9: calls for minutes over a slow link, of which a third time out. Prints the slope of the resident memory of the
// server and of its client, each a process of its own, with what malloc keeps: that is what an operator sees. Ends with
// 0 when neither grows.
#include "expert_server/server.hpp"
#include "net/rpc_client.hpp"
#include "testbed/network_relay.hpp"

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>

#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

using namespace dmoe;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr std::uint64_t kBytesPerSecond = 50'000'000 / 8;  // 50 Mbit/s, each way.
constexpr std::size_t kInFlight = 16;
constexpr std::int64_t kFeatures = 1'024;
constexpr auto kSamplePeriod = 5s;

double resident_mb(pid_t process) {
  std::ifstream in("/proc/" + std::to_string(process) + "/statm");
  std::size_t total = 0;
  std::size_t resident = 0;
  in >> total >> resident;
  return static_cast<double>(resident) * static_cast<double>(::sysconf(_SC_PAGESIZE)) / 1e6;
}

/// Least squares, per hour.
double slope_per_hour(const std::vector<std::pair<double, double>>& samples) {
  double mean_x = 0;
  double mean_y = 0;
  for (const auto& [x, y] : samples) {
    mean_x += x / static_cast<double>(samples.size());
    mean_y += y / static_cast<double>(samples.size());
  }
  double above = 0;
  double below = 0;
  for (const auto& [x, y] : samples) {
    above += (x - mean_x) * (y - mean_y);
    below += (x - mean_x) * (x - mean_x);
  }
  return below > 0 ? 3'600 * above / below : 0;
}

/// Serves until `end` is closed. Writes its port to `ready`.
[[noreturn]] void serve(int ready, int end) {
  {
    expert_server::ServerOptions options;
    options.listen = {"127.0.0.1", 0};
    options.expert_pattern = "nop.[0:1]";
    options.expert.architecture = "nop";
    options.expert.hidden_dim = kFeatures;
    options.compute_threads = 1;
    auto server = expert_server::Server::start(std::move(options));
    if (server.has_error()) {
      std::cerr << describe(server.error()) << '\n';
      std::_Exit(1);
    }
    const std::uint16_t port = (*server)->port();
    if (::write(ready, &port, sizeof(port)) != sizeof(port)) std::_Exit(1);
    pollfd closed{end, POLLIN, 0};
    while (::poll(&closed, 1, -1) < 0 && errno == EINTR) {
    }
  }
  std::_Exit(0);
}

/// Calls without end, 16 in flight, of 1 to 64 rows; three in ten have no chance to be answered in time.
class Caller {
 public:
  explicit Caller(std::uint16_t port)
      : endpoint_{"127.0.0.1", port}, work_(boost::asio::make_work_guard(io_)), client_(io_.get_executor()) {
    thread_ = std::thread([this] { io_.run(); });
    for (std::size_t i = 0; i < kInFlight; ++i) call();
  }
  ~Caller() {
    stopping_ = true;
    client_.stop();
    work_.reset();
    thread_.join();
  }
  Caller(const Caller&) = delete;
  Caller& operator=(const Caller&) = delete;

  std::atomic<std::size_t> answered{0};
  std::atomic<std::size_t> timed_out{0};
  std::atomic<std::size_t> failed{0};

 private:
  void call() {
    std::size_t rows = 0;
    bool hopeless = false;
    {
      const std::lock_guard lock(mutex_);
      rows = 1 + random_() % 64;
      hopeless = random_() % 10 < 3;
    }
    net::CallSpec spec;
    spec.fill = [rows](net::schema::Call::Builder call, net::Attachments&) {
      auto forward = call.initForward();
      forward.setUid("nop.0");
      auto tensor = forward.initInputs(1)[0];
      tensor.setDtype(net::schema::DType::FLOAT32);
      auto shape = tensor.initShape(2);
      shape.set(0, static_cast<std::int64_t>(rows));
      shape.set(1, kFeatures);
      tensor.initData(static_cast<unsigned>(rows * kFeatures * sizeof(float)));
    };
    spec.deadline = Clock::now() + (hopeless ? 1ms : 20'000ms);
    spec.on_reply = [this](const Result<net::IncomingReply>& reply) {
      if (reply.has_value()) {
        ++answered;
      } else if (reply.error().code == Errc::kDeadlineExceeded) {
        ++timed_out;
      } else {
        ++failed;
      }
      if (!stopping_) call();
    };
    std::vector<net::CallSpec> calls;
    calls.push_back(std::move(spec));
    client_.start(endpoint_, std::move(calls));
  }

  const net::Endpoint endpoint_;
  boost::asio::io_context io_;
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_;
  net::RpcClient client_;
  std::mutex mutex_;
  std::mt19937_64 random_{1};  // Guarded by mutex_.
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace

int main(int argc, char* argv[]) {
  const double minutes = argc > 1 ? std::atof(argv[1]) : 10;
  std::array<int, 2> ready{};
  std::array<int, 2> end{};
  if (::pipe(ready.data()) != 0 || ::pipe(end.data()) != 0) return 1;
  const pid_t server = ::fork();  // Before any thread.
  if (server == 0) {
    ::close(end[1]);
    serve(ready[1], end[0]);
  }
  ::close(ready[1]);
  std::uint16_t port = 0;
  if (::read(ready[0], &port, sizeof(port)) != sizeof(port)) return 1;

  std::vector<std::pair<double, double>> of_server;
  std::vector<std::pair<double, double>> of_client;
  {
    testbed::NetworkRelay relay(1, /*seed=*/1);
    testbed::LinkConditions slow;
    slow.bytes_per_second = kBytesPerSecond;
    slow.cut_after = 60s;
    relay.set(slow);
    relay.start({port});
    Caller caller(relay.port(0));
    const auto begin = Clock::now();
    const auto total = std::chrono::duration<double>(minutes * 60);
    for (auto next = begin; Clock::now() - begin < total;) {
      next += kSamplePeriod;
      std::this_thread::sleep_until(next);  // A pace, not a wait for something.
      const std::chrono::duration<double> at = Clock::now() - begin;
      const double server_mb = resident_mb(server);
      const double client_mb = resident_mb(::getpid());
      std::cout << static_cast<int>(at.count()) << " s: server " << server_mb << " MB, client " << client_mb << " MB; "
                << caller.answered << " answered, " << caller.timed_out << " timed out, " << caller.failed
                << " failed\n"
                << std::flush;
      if (at < total / 4) continue;  // Warm-up.
      of_server.emplace_back(at.count(), server_mb);
      of_client.emplace_back(at.count(), client_mb);
    }
  }
  ::close(end[1]);
  ::waitpid(server, nullptr, 0);
  if (of_server.size() < 4) return 0;
  const double server_slope = slope_per_hour(of_server);
  const double client_slope = slope_per_hour(of_client);
  std::cout << "slope after warm-up: server " << server_slope << " MB/h, client " << client_slope << " MB/h\n";
  // Minutes show less than hours: what moves by less than 4 MB is noise.
  const auto grows = [&](double slope) { return slope > 1 && slope * minutes / 60 > 4; };
  return grows(server_slope) || grows(client_slope) ? 1 : 0;
}
