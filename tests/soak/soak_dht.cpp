// Real nodes on loopback that come and go for minutes. Ends with 0 when every live record was found and memory is flat.
#include "dht/blocking.hpp"
#include "dht/service.hpp"

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>

#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <future>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

using namespace dmoe;
using namespace std::chrono_literals;
using SteadyClock = std::chrono::steady_clock;

double rss_mb() {
  ::malloc_trim(0);
  std::ifstream in("/proc/self/statm");
  std::size_t total = 0;
  std::size_t resident = 0;
  in >> total >> resident;
  return static_cast<double>(resident) * static_cast<double>(::sysconf(_SC_PAGESIZE)) / (1 << 20);
}

class Swarm {
 public:
  explicit Swarm(std::size_t nodes) : work_(boost::asio::make_work_guard(io_)), nodes_(nodes) {
    for (int i = 0; i < 2; ++i) threads_.emplace_back([this] { io_.run(); });
    for (std::size_t i = 0; i < nodes_.size(); ++i) start(i);
  }
  ~Swarm() {
    for (auto& node : nodes_) node.reset();
    work_.reset();
    io_.stop();
    for (auto& thread : threads_) thread.join();
  }
  Swarm(const Swarm&) = delete;
  Swarm& operator=(const Swarm&) = delete;

  /// A new node with a new key in place `i`, joined through two others.
  void start(std::size_t i) {
    nodes_[i].reset();
    dht::ServiceOptions options;
    options.listen = {"127.0.0.1", 0};
    for (int k = 0; k < 4; ++k) {
      const auto& other = nodes_[random_() % nodes_.size()];
      if (other) options.initial_peers.push_back({"127.0.0.1", other->port()});
    }
    auto service = dht::Service::start(io_, net::Identity::generate(), options);
    if (!service.has_value()) {
      std::cerr << describe(service.error()) << '\n';
      std::exit(1);
    }
    nodes_[i] = std::move(*service);
    std::promise<void> joined;
    nodes_[i]->join([&](const Result<void>&) { joined.set_value(); });
    joined.get_future().wait();
  }
  dht::Service& any() { return *nodes_[random_() % nodes_.size()]; }
  std::size_t pick() { return random_() % nodes_.size(); }

 private:
  boost::asio::io_context io_;
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_;
  std::vector<std::unique_ptr<dht::Service>> nodes_;
  std::vector<std::thread> threads_;
  std::mt19937_64 random_{std::random_device{}()};
};

}  // namespace

int main(int argc, char* argv[]) {
  const auto minutes = std::chrono::minutes{argc > 1 ? std::atoi(argv[1]) : 10};
  const std::size_t nodes = argc > 2 ? static_cast<std::size_t>(std::atoi(argv[2])) : 200;
  Swarm swarm(nodes);
  const auto end = SteadyClock::now() + minutes;
  std::vector<std::pair<std::string, SteadyClock::time_point>> records;
  std::size_t stored = 0;
  std::size_t restarts = 0;
  double early_mb = 0;
  for (std::size_t round = 0; SteadyClock::now() < end; ++round) {
    for (int i = 0; i < 20; ++i) {
      const std::string name = "record" + std::to_string(stored++);
      dht::BlockingDht dht(swarm.any().node());
      const auto result = dht.store({dht::Key::of(name), {}, std::vector<std::uint8_t>(100, 7), 5min, false});
      if (result.has_value()) records.emplace_back(name, SteadyClock::now() + 5min);
    }
    std::erase_if(records, [](const auto& record) { return record.second < SteadyClock::now() + 10s; });
    // One node in a hundred vanishes and another comes, every round.
    for (std::size_t i = 0; i < nodes / 100 + 1; ++i, ++restarts) swarm.start(swarm.pick());
    if (round == 50) early_mb = rss_mb();
    if (round % 50 == 0) {
      std::cout << "round " << round << ": " << records.size() << " live records, " << restarts << " restarts, "
                << rss_mb() << " MB\n"
                << std::flush;
    }
  }
  std::size_t missing = 0;
  for (const auto& [name, until] : records) {
    if (until < SteadyClock::now() + 2s) continue;
    const auto found = dht::BlockingDht(swarm.any().node()).find(dht::Key::of(name));
    if (!found.has_value() || found->records.empty()) ++missing;
  }
  const double late_mb = rss_mb();
  const bool flat = early_mb == 0 || late_mb < 1.25 * early_mb + 64;
  std::cout << records.size() << " live records, " << missing << " missing; memory " << early_mb << " -> " << late_mb
            << " MB" << (flat ? "" : ", growing") << '\n';
  return missing == 0 && flat ? 0 : 1;
}
