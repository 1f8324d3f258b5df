// Writing and reading checkpoints against dd on the same disk, and what calls notice of a checkpoint being written.
#include "bench/scratch_folder.hpp"
#include "bench/served_expert.hpp"
#include "bench/suite.hpp"
#include "expert_server/checkpoint_store.hpp"

#include <torch/types.h>

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <future>
#include <mutex>

extern char** environ;

namespace dmoe::bench {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kCheckpointHidden = 1'680;  ///< 24 h^2 weights and three numbers of Adam for each: 1.01 GiB.
constexpr int kDiskRounds = 4;
constexpr int kServingClients = 4;
constexpr std::int64_t kServingRows = 4;

double seconds_after(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// Seconds that `dd` takes.
double dd_seconds(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "dd");
  arguments.emplace_back("status=none");
  std::vector<char*> pointers;
  for (auto& argument : arguments) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  const auto start = Clock::now();
  pid_t child = 0;
  int status = 0;
  const bool ran = ::posix_spawnp(&child, "dd", nullptr, nullptr, pointers.data(), environ) == 0 &&
                   ::waitpid(child, &status, 0) == child && status == 0;
  if (!ran) throw std::runtime_error("dd cannot be run, so there is nothing to compare with");
  return seconds_after(start);
}

/// The next reader meets the disk, not the page cache.
void forget_cached(const fs::path& file) {
  const int descriptor = ::open(file.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return;
  (void)::posix_fadvise(descriptor, 0, 0, POSIX_FADV_DONTNEED);
  ::close(descriptor);
}

expert_server::ExpertOptions large_expert() {
  expert_server::ExpertOptions expert;
  expert.hidden_dim = kCheckpointHidden;
  return expert;
}

fs::path newest_file(const fs::path& folder) {
  fs::path newest;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) newest = std::max(newest, entry.path());
  }
  return newest;
}

void measure_disk(Reporter& reporter) {
  const ScratchFolder folder;
  auto backend = expert_server::ExpertBackend::create({parse_expert_uid("ffn.0").value(), "ffn", kCheckpointHidden, {}},
                                                      {}, 16, 1);
  if (!backend) throw std::runtime_error(describe(backend.error()));
  const auto x = torch::randn({1, kCheckpointHidden});
  (*backend)->backward({x}, {x}, 0).value();
  const auto snapshot = (*backend)->snapshot();
  backend->reset();
  expert_server::CheckpointStore store(folder.path() / "checkpoints", 1);
  const auto plain = folder.path() / "plain";
  double write = 0, read = 0, dd_write = 0, dd_read = 0, bytes = 0;
  for (int round = 0; round < kDiskRounds; ++round) {
    auto start = Clock::now();
    store.save(snapshot).value();
    write += seconds_after(start);
    const auto file = newest_file(folder.path() / "checkpoints");
    bytes = static_cast<double>(fs::file_size(file));
    // dd moves the same bytes: disks of virtual machines are much faster with zeros.
    const auto from = "if=" + file.string();
    dd_seconds({from, "of=/dev/null", "bs=1M"});  // Into the page cache, from which it writes.
    dd_write += dd_seconds({from, "of=" + plain.string(), "bs=1M", "conv=fsync"});
    const auto read_by_dd = [&] {
      forget_cached(file);
      dd_read += dd_seconds({from, "of=/dev/null", "bs=1M"});
    };
    if (round % 2 == 0) read_by_dd();  // By turns: whoever comes second may find the host's cache warm.
    forget_cached(file);
    start = Clock::now();
    expert_server::read_checkpoint(file).value();
    read += seconds_after(start);
    if (round % 2 == 1) read_by_dd();
  }
  const auto rate = [&](double seconds) { return kDiskRounds * bytes / seconds / 1e9; };
  reporter.report("checkpoint", {{"mode", "disk"},
                                 {"gib", bytes / (1UL << 30U)},
                                 {"write_gb_per_s", rate(write)},
                                 {"dd_write_gb_per_s", rate(dd_write)},
                                 {"read_gb_per_s", rate(read)},
                                 {"dd_read_gb_per_s", rate(dd_read)},
                                 {"write_ratio", dd_write / write},
                                 {"read_ratio", dd_read / read}});
}

/// Latencies in ms of all clients' calls until `done` says so.
std::vector<double> latencies(const std::function<void(int)>& call, const std::function<bool()>& done) {
  std::mutex mutex;
  std::vector<double> all;
  std::vector<std::future<void>> clients;
  for (int i = 0; i < kServingClients; ++i) {
    clients.push_back(std::async(std::launch::async, [&, i] {
      while (!done()) {
        const auto start = Clock::now();
        call(i);
        const auto took = 1e3 * seconds_after(start);
        const std::lock_guard lock(mutex);
        all.push_back(took);
      }
    }));
  }
  for (auto& client : clients) client.get();
  return all;
}

void measure_serving(const Options& options, Reporter& reporter, bool backward) {
  const ScratchFolder folder;
  expert_server::ServerOptions server_options;
  server_options.listen = {"127.0.0.1", 0};
  server_options.expert_pattern = "ffn.[0:1]";
  server_options.expert = large_expert();
  server_options.data_dir = folder.path();
  server_options.checkpoint_period = std::chrono::milliseconds{0};
  server_options.keep_checkpoints = 1;
  server_options.seed = 1;
  auto server = expert_server::Server::start(std::move(server_options));
  if (!server) throw std::runtime_error(describe(server.error()));
  ClientThread thread;
  std::vector<std::unique_ptr<ExpertClient>> clients;
  for (int i = 0; i < kServingClients; ++i)
    clients.push_back(std::make_unique<ExpertClient>(thread, (*server)->port()));
  const auto x = torch::randn({kServingRows, kCheckpointHidden});
  const auto gradient = x / 1'000;
  const auto call = [&](int i) {
    auto& client = *clients[static_cast<std::size_t>(i)];
    backward ? client.backward("ffn.0", x, gradient) : client.forward("ffn.0", x);
  };
  std::vector<double> without;
  std::vector<double> with;
  double written_seconds = 0;
  for (int round = 0; round < kDiskRounds; ++round) {
    clients[0]->backward("ffn.0", x, gradient);  // So that there is something new to write.
    const auto start = Clock::now();
    const double window = std::max(options.seconds, 2.0);
    auto quiet = latencies(call, [&] { return seconds_after(start) > window; });
    without.insert(without.end(), quiet.begin(), quiet.end());
    std::atomic<bool> written{false};
    auto writing = std::async(std::launch::async, [&] {
      const auto began = Clock::now();
      const auto outcome = (*server)->checkpoint();
      written_seconds += seconds_after(began) / kDiskRounds;
      written = true;
      return outcome;
    });
    auto busy = latencies(call, [&] { return written.load(); });
    with.insert(with.end(), busy.begin(), busy.end());
    writing.get().value();
  }
  const auto p50_without = percentile(without, 0.5);
  const auto p99_without = percentile(without, 0.99);
  const auto p50_with = percentile(with, 0.5);
  const auto p99_with = percentile(with, 0.99);
  reporter.report("checkpoint", {{"mode", backward ? "serving_forward_backward" : "serving_forward"},
                                 {"clients", kServingClients},
                                 {"rows", kServingRows},
                                 {"calls_without", without.size()},
                                 {"calls_with", with.size()},
                                 {"written_s", written_seconds},
                                 {"p50_ms_without", p50_without},
                                 {"p50_ms_with", p50_with},
                                 {"p99_ms_without", p99_without},
                                 {"p99_ms_with", p99_with},
                                 {"p99_ratio", p99_with / p99_without}});
}

}  // namespace

void checkpoint_suite(const Options& options, Reporter& reporter) {
  const auto wanted = [&](const char* mode) { return !options.mode || *options.mode == mode; };
  if (wanted("disk")) measure_disk(reporter);
  if (wanted("serving_forward")) measure_serving(options, reporter, false);
  if (wanted("serving_forward_backward")) measure_serving(options, reporter, true);
}

}  // namespace dmoe::bench
