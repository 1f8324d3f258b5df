// A server of many experts: how soon it answers and what it holds, with how many threads it is fastest, and at how many
// busy experts it is full.
#include "bench/scratch_folder.hpp"
#include "bench/served_expert.hpp"
#include "bench/suite.hpp"
#include "expert_server/compute_threads.hpp"

#include <torch/types.h>

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <string>

extern char** environ;

namespace dmoe::bench {
namespace {

using HostingClock = std::chrono::steady_clock;

double seconds_between(HostingClock::time_point start) {
  return std::chrono::duration<double>(HostingClock::now() - start).count();
}

/// The `dmoe` program beside this one, serving until destroyed.
class ServeProcess {
 public:
  explicit ServeProcess(const std::vector<std::string>& options) {
    const auto program = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "dmoe";
    int ready[2];
    if (::pipe(ready) != 0) throw std::runtime_error("cannot make a pipe");
    std::vector<std::string> arguments{program.string(), "serve", "--listen",   "127.0.0.1:0",
                                       "--ready-fd",     "3",     "--data-dir", data_.path().string()};
    arguments.insert(arguments.end(), options.begin(), options.end());
    std::vector<char*> pointers;
    for (auto& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, ready[1], 3);
    ::posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    ::posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
    const int spawned = ::posix_spawn(&pid_, program.c_str(), &actions, nullptr, pointers.data(), environ);
    ::posix_spawn_file_actions_destroy(&actions);
    ::close(ready[1]);
    std::string line;
    char letter = 0;
    while (spawned == 0 && ::read(ready[0], &letter, 1) == 1 && letter != '\n') line += letter;
    ::close(ready[0]);
    const auto json = nlohmann::json::parse(line, nullptr, false);
    if (!json.is_object()) throw std::runtime_error(program.string() + " serve did not come up");
    const auto listen = json.at("listen").get<std::string>();
    port_ = static_cast<std::uint16_t>(std::stoi(listen.substr(listen.rfind(':') + 1)));
  }
  ~ServeProcess() {
    if (pid_ <= 0) return;
    (void)::kill(pid_, SIGKILL);
    (void)::waitpid(pid_, nullptr, 0);
  }
  ServeProcess(const ServeProcess&) = delete;
  ServeProcess& operator=(const ServeProcess&) = delete;

  std::uint16_t port() const noexcept { return port_; }
  /// Proportional set size: its own memory, and its share of what it maps with others.
  double pss_mb() const {
    std::ifstream file("/proc/" + std::to_string(pid_) + "/smaps_rollup");
    std::string word;
    while (file >> word) {
      double kib = 0;
      if (word == "Pss:" && file >> kib) return kib * 1'024 / 1e6;
    }
    return 0;
  }

 private:
  const ScratchFolder data_;
  pid_t pid_ = 0;
  std::uint16_t port_ = 0;
};

/// From the start of the process to the answer of a forward call, and its memory afterwards.
void measure_startup(Reporter& reporter, std::int64_t hidden) {
  constexpr int kExperts = 16;
  std::array<double, 3> seconds{};
  double memory = 0;
  for (auto& one : seconds) {
    const auto start = HostingClock::now();
    const ServeProcess server({"ffn.[0:" + std::to_string(kExperts) + "]", "--hidden-dim", std::to_string(hidden)});
    ClientThread thread;
    ExpertClient client(thread, server.port());
    client.forward("ffn.0", torch::ones({1, hidden}));
    one = seconds_between(start);
    memory = server.pss_mb();
  }
  std::sort(seconds.begin(), seconds.end());
  const double parameters = static_cast<double>(kExperts * (24 * hidden * hidden + 25 * hidden));
  reporter.report("hosting", {{"mode", "startup"},
                              {"experts", kExperts},
                              {"hidden", hidden},
                              {"parameters_mb", 4 * parameters / 1e6},
                              {"best_s", seconds.front()},
                              {"median_s", seconds[1]},
                              {"pss_mb", memory}});
}

/// Many clients of the many experts of a server of its own process, each on its own connection.
class Crowd {
 public:
  /// `threads`: compute threads of the server; 0: its default.
  Crowd(ClientThread& thread, std::int64_t hidden, int experts, int clients, int threads)
      : experts_(experts), server_(arguments(hidden, experts, threads)) {
    for (int i = 0; i < clients; ++i) clients_.push_back(std::make_unique<ExpertClient>(thread, server_.port()));
  }

  void forward(int client, const at::Tensor& x) { of(client).forward(uid(client), x); }
  void backward(int client, const at::Tensor& x) { of(client).backward(uid(client), x, x / 1'000); }

 private:
  ExpertClient& of(int client) { return *clients_[static_cast<std::size_t>(client)]; }
  std::string uid(int client) const { return "ffn." + std::to_string(client % experts_); }

  static std::vector<std::string> arguments(std::int64_t hidden, int experts, int threads) {
    std::vector<std::string> all{"ffn.[0:" + std::to_string(experts) + "]", "--hidden-dim", std::to_string(hidden)};
    if (threads > 0) all.insert(all.end(), {"--threads", std::to_string(threads)});
    return all;
  }

  int experts_;
  ServeProcess server_;
  std::vector<std::unique_ptr<ExpertClient>> clients_;
};

/// The same load with several numbers of compute threads, by turns. The servers are processes: how many threads
/// OpenBLAS takes is a setting of a whole process.
void measure_threads(const Options& options, Reporter& reporter) {
  constexpr std::int64_t kHidden = 256;
  constexpr int kExperts = 16;
  constexpr int kClients = 32;
  const std::int64_t rows = 32;
  const int cores = expert_server::effective_compute_threads(0);
  std::vector<int> numbers{0};
  for (int threads = 1; threads <= 2 * cores; ++threads) numbers.push_back(threads);
  const auto x = torch::randn({rows, kHidden});
  std::vector<double> rates(numbers.size());
  ClientThread thread;
  std::vector<std::unique_ptr<Crowd>> crowds;
  for (const int threads : numbers)
    crowds.push_back(std::make_unique<Crowd>(thread, kHidden, kExperts, kClients, threads));
  for (int round = -1; round < 3; ++round) {
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      const auto step = [&](int client) {
        crowds[i]->forward(client, x);
        crowds[i]->backward(client, x);
      };
      // The default looks back over some seconds, in which another server was busy.
      rate_of_callers(kClients, step, rows, (round < 0 ? 4 : 2) * options.seconds);
      if (round < 0) continue;
      rates[i] += rate_of_callers(kClients, step, rows, options.seconds) / 3;
    }
  }
  const double best = *std::max_element(rates.begin() + 1, rates.end());
  nlohmann::ordered_json fields{
      {"mode", "threads"}, {"experts", kExperts}, {"clients", kClients},           {"rows", rows},
      {"hidden", kHidden}, {"cores", cores},      {"default_rows_per_s", rates[0]}};
  for (std::size_t i = 1; i < numbers.size(); ++i) {
    fields["rows_per_s_" + std::to_string(numbers[i]) + "_threads"] = rates[i];
  }
  fields["default_to_best"] = rates[0] / best;
  reporter.report("hosting", fields);
}

/// 16 experts of the paper's width under 16 clients.
void measure_throughput(const Options& options, Reporter& reporter) {
  constexpr std::int64_t kHidden = 1'024;
  constexpr int kExperts = 16;
  constexpr std::int64_t kRows = 256;
  const auto x = torch::randn({kRows, kHidden});
  ClientThread thread;
  Crowd crowd(thread, kHidden, kExperts, kExperts, 0);
  const auto forward = [&](int client) { crowd.forward(client, x); };
  const auto both = [&](int client) {
    crowd.forward(client, x);
    crowd.backward(client, x);
  };
  rate_of_callers(kExperts, both, kRows, 0);
  const auto forward_rate = rate_of_callers(kExperts, forward, kRows, 2 * options.seconds);
  const auto both_rate = rate_of_callers(kExperts, both, kRows, 2 * options.seconds);
  reporter.report("hosting", {{"mode", "throughput"},
                              {"experts", kExperts},
                              {"clients", kExperts},
                              {"rows", kRows},
                              {"hidden", kHidden},
                              {"forward_samples_per_s", forward_rate},
                              {"forward_backward_samples_per_s", both_rate}});
}

/// Rows per second and latency while 1, 2, 4, … experts are busy, each with a client of its own.
void measure_saturation(const Options& options, Reporter& reporter) {
  constexpr std::int64_t kHidden = 256;
  constexpr std::int64_t kRows = 4;
  constexpr int kMost = 64;
  const auto x = torch::randn({kRows, kHidden});
  ClientThread thread;
  Crowd crowd(thread, kHidden, kMost, kMost, 0);
  struct Point {
    int experts;
    double rate;
    double p50_ms;
  };
  std::vector<Point> points;
  for (int busy = 1; busy <= kMost; busy *= 2) {
    std::mutex mutex;
    std::vector<double> latencies;
    const auto step = [&](int client) {
      const auto start = HostingClock::now();
      crowd.forward(client, x);
      const double took = 1e3 * seconds_between(start);
      const std::lock_guard lock(mutex);
      latencies.push_back(took);
    };
    rate_of_callers(busy, step, kRows, 0);
    latencies.clear();
    const double rate = rate_of_callers(busy, step, kRows, options.seconds);
    points.push_back({busy, rate, percentile(latencies, 0.5)});
  }
  const auto best =
      std::max_element(points.begin(), points.end(), [](auto a, auto b) { return a.rate < b.rate; })->rate;
  const auto full = std::find_if(points.begin(), points.end(), [&](auto point) { return point.rate >= 0.9 * best; });
  for (const auto& point : points) {
    reporter.report("hosting", {{"mode", "saturation"},
                                {"busy_experts", point.experts},
                                {"rows", kRows},
                                {"hidden", kHidden},
                                {"rows_per_s", point.rate},
                                {"p50_ms", point.p50_ms},
                                {"saturated_at", full->experts}});
  }
}

}  // namespace

void hosting_suite(const Options& options, Reporter& reporter) {
  const auto wanted = [&](const char* mode) { return !options.mode || *options.mode == mode; };
  if (wanted("startup")) {
    measure_startup(reporter, 580);  // 16 experts of this width hold 520 MB.
    measure_startup(reporter, 1'024);
  }
  if (wanted("threads")) measure_threads(options, reporter);
  if (wanted("throughput")) measure_throughput(options, reporter);
  if (wanted("saturation")) measure_saturation(options, reporter);
}

}  // namespace dmoe::bench
