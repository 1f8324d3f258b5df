// Finds and stores between real nodes on loopback, and the record store on disk.
#include "bench/suite.hpp"
#include "dht/node.hpp"
#include "dht/rocksdb_store.hpp"
#include "dht/service.hpp"
#include "net/identity.hpp"

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>

#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <future>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

namespace dmoe::bench {
namespace {

using namespace std::chrono_literals;
using SteadyClock = std::chrono::steady_clock;

double microseconds(SteadyClock::duration time) { return std::chrono::duration<double, std::micro>(time).count(); }

double rss_kb() {
  ::malloc_trim(0);
  std::ifstream in("/proc/self/statm");
  std::size_t total = 0;
  std::size_t resident = 0;
  in >> total >> resident;
  return static_cast<double>(resident) * static_cast<double>(::sysconf(_SC_PAGESIZE)) / 1024;
}

dht::StoreRequest request(const std::string& name) {
  return {dht::Key::of(name), {}, std::vector<std::uint8_t>(100, 7), 1h, false};
}

/// Services on one io_context, and threads for it as they are asked for.
class Swarm {
 public:
  explicit Swarm(std::size_t nodes) : work_(boost::asio::make_work_guard(io_)) {
    add_thread();
    for (std::size_t i = 0; i < nodes; ++i) {
      dht::ServiceOptions options;
      options.listen = {"127.0.0.1", 0};
      if (i != 0) options.initial_peers = {{"127.0.0.1", services_.front()->port()}};
      auto service = dht::Service::start(io_, net::Identity::generate(), options);
      if (!service.has_value()) throw std::runtime_error(describe(service.error()));
      services_.push_back(std::move(*service));
      std::promise<Result<void>> joined;
      services_.back()->join([&](Result<void> result) { joined.set_value(std::move(result)); });
      if (const auto result = joined.get_future().get(); !result.has_value()) {
        throw std::runtime_error(describe(result.error()));
      }
    }
  }
  ~Swarm() {
    for (auto& service : services_) service->stop();
    work_.reset();
    io_.stop();
    for (std::thread& thread : threads_) thread.join();
  }
  Swarm(const Swarm&) = delete;
  Swarm& operator=(const Swarm&) = delete;

  void add_thread() {
    threads_.emplace_back([this] { io_.run(); });
  }
  std::size_t size() const { return services_.size(); }
  dht::Node& node(std::size_t i) { return services_[i]->node(); }
  dht::ExpertDirectory& directory(std::size_t i) { return services_[i]->directory(); }

  dht::ServiceStats stats() {
    dht::ServiceStats sum;
    for (auto& service : services_) {
      std::promise<dht::ServiceStats> one;
      service->stats([&](dht::ServiceStats stats) { one.set_value(stats); });
      const auto stats = one.get_future().get();
      sum.known_nodes += stats.known_nodes;
      sum.datagrams_sent += stats.datagrams_sent;
    }
    return sum;
  }

  /// Until no table has changed for a while: joins, proofs and early self-lookups are over.
  void settle() {
    std::size_t known = 0;
    std::uint64_t sent = 0;
    for (int calm = 0; calm < 4;) {
      std::this_thread::sleep_for(500ms);
      const auto now = stats();
      calm = now.known_nodes == known && now.datagrams_sent - sent < size() * 20 ? calm + 1 : 0;
      known = now.known_nodes;
      sent = now.datagrams_sent;
    }
  }

 private:
  boost::asio::io_context io_;
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_;
  std::vector<std::unique_ptr<dht::Service>> services_;
  std::vector<std::thread> threads_;
};

/// One operation after the other, each from another node: their times in microseconds.
template <class Start>
std::vector<double> one_by_one(Swarm& swarm, std::size_t count, Start start) {
  std::vector<double> times;
  for (std::size_t i = 0; i < count; ++i) {
    dht::Node& node = swarm.node(i % swarm.size());
    std::promise<double> done;
    node.clock().post([&] {
      const auto began = SteadyClock::now();
      start(node, i, [&, began] { done.set_value(microseconds(SteadyClock::now() - began)); });
    });
    times.push_back(done.get_future().get());
  }
  return times;
}

/// Keeps `in_flight` operations going for `seconds`, spread over the first `clients` nodes; operations per second.
template <class Start>
double at_once(Swarm& swarm, std::size_t clients, std::size_t in_flight, double seconds, Start start) {
  struct Run {
    std::atomic<std::size_t> next{0};
    std::atomic<std::size_t> done{0};
    std::atomic<std::size_t> open{0};
    std::atomic<bool> over{false};
    std::promise<void> ended;
  };
  Run run;
  std::function<void(dht::Node&)> go = [&](dht::Node& node) {
    start(node, run.next++, [&run, &go, &node] {
      ++run.done;
      if (!run.over) return go(node);
      if (--run.open == 0) run.ended.set_value();
    });
  };
  run.open = in_flight;
  const auto began = SteadyClock::now();
  for (std::size_t i = 0; i < in_flight; ++i) {
    dht::Node& node = swarm.node(i % clients);
    node.clock().post([&go, &node] { go(node); });
  }
  std::this_thread::sleep_until(
      began + std::chrono::duration_cast<SteadyClock::duration>(std::chrono::duration<double>(seconds)));
  const double count = static_cast<double>(run.done.load());
  const double took = std::chrono::duration<double>(SteadyClock::now() - began).count();
  run.over = true;
  run.ended.get_future().get();
  return count / took;
}

void must(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(what);
}

void loopback(const Options& options, Reporter& reporter) {
  const std::size_t nodes = options.nodes.value_or(64);
  const double before_kb = rss_kb();
  Swarm swarm(nodes);
  swarm.settle();
  const double per_node_kb = (rss_kb() - before_kb) / static_cast<double>(nodes);
  reporter.note("settled: " + std::to_string(swarm.stats().known_nodes / nodes) + " known nodes on average");

  std::atomic<std::size_t> requests{0};
  std::atomic<std::size_t> lost{0};
  const auto store_one = [&](const std::string& prefix) {
    return [&, prefix](dht::Node& node, std::size_t i, auto done) {
      node.store(request(prefix + std::to_string(i)), [&, done](Result<dht::StoreReport> stored) {
        if (!stored.has_value() || stored->replicas < std::min<std::size_t>(8, nodes)) ++lost;
        done();
      });
    };
  };
  // Read by others than the writers: operation i runs on node i, or wherever it was started.
  const auto find_one = [&](const std::string& prefix, std::size_t range, std::size_t shift) {
    return [&, prefix, range, shift](dht::Node& node, std::size_t i, auto done) {
      node.find(dht::Key::of(prefix + std::to_string((i + shift) % range)), {},
                [&, done](Result<dht::FindResult> found) {
                  if (!found.has_value() || found->records.empty()) {
                    ++lost;
                  } else {
                    requests += found->requests;
                  }
                  done();
                });
    };
  };

  constexpr std::size_t kSequential = 2'000;
  one_by_one(swarm, 64, store_one("warm"));
  swarm.add_thread();
  auto store_times = one_by_one(swarm, kSequential, store_one("seq"));
  requests = 0;
  auto find_times = one_by_one(swarm, kSequential, find_one("seq", kSequential, 29));
  const double requests_per_find = static_cast<double>(requests) / kSequential;

  std::promise<double> many;
  dht::Node& reader = swarm.node(nodes / 2);
  reader.clock().post([&] {
    std::vector<dht::Key> keys;
    for (int i = 0; i < 256; ++i) keys.push_back(dht::Key::of("seq" + std::to_string(7 * i + 3)));
    const auto began = SteadyClock::now();
    reader.find_many(std::move(keys), {}, [&, began](std::vector<Result<dht::FindResult>> found) {
      for (const auto& one : found) lost += one.has_value() && !one->records.empty() ? 0 : 1;
      many.set_value(microseconds(SteadyClock::now() - began) / 1'000);
    });
  });
  const double find_many_ms = many.get_future().get();

  const auto announce = [&](std::size_t from) {
    std::vector<ExpertUid> uids;
    for (Coordinate i = 0; i < 64; ++i) {
      for (Coordinate j = 0; j < 64; ++j) uids.push_back({"ffn", {i, j}});
    }
    const std::uint64_t sent_before = swarm.stats().datagrams_sent;
    std::promise<Result<dht::AnnounceReport>> announced;
    const auto began = SteadyClock::now();
    swarm.directory(from).announce(std::move(uids), {{"127.0.0.1", 4040}}, 60s,
                                   [&](Result<dht::AnnounceReport> report) { announced.set_value(std::move(report)); });
    const auto report = announced.get_future().get();
    const double ms = microseconds(SteadyClock::now() - began) / 1'000;
    must(report.has_value() && report->stored == report->records, "an announced record was not stored");
    return std::make_pair(ms, swarm.stats().datagrams_sent - sent_before);
  };
  const auto [announce_ms, announce_datagrams] = announce(3);

  // One client with much in flight signs in batches; many clients with one store each cannot.
  const double stores_per_s = at_once(swarm, 1, 64, options.seconds, store_one("busy"));
  // Nearly as many as were stored: the last ones were under way when the time was up.
  const auto stored = std::max<std::size_t>(1, static_cast<std::size_t>(0.9 * stores_per_s * options.seconds));
  const double finds_per_s = at_once(swarm, nodes, 64, options.seconds, find_one("busy", stored, 17));
  const double finds_per_s_1024 = at_once(swarm, nodes, 1'024, options.seconds, find_one("busy", stored, 31));
  const double stores_per_s_1024 = at_once(swarm, 1, 1'024, options.seconds, store_one("flood"));
  const double stores_per_s_spread = at_once(swarm, nodes, 64, options.seconds, store_one("spread"));

  reporter.report("dht", {{"store", "memory"},
                          {"nodes", nodes},
                          {"find_p50_us", percentile(find_times, 0.5)},
                          {"find_p99_us", percentile(find_times, 0.99)},
                          {"store_p50_us", percentile(store_times, 0.5)},
                          {"store_p99_us", percentile(store_times, 0.99)},
                          {"finds_per_s", finds_per_s},
                          {"stores_per_s", stores_per_s},
                          {"finds_per_s_1024", finds_per_s_1024},
                          {"stores_per_s_1024", stores_per_s_1024},
                          {"stores_per_s_64_clients", stores_per_s_spread},
                          {"requests_per_find", requests_per_find},
                          {"find_many_256_ms", find_many_ms},
                          {"rss_kb_per_node", per_node_kb},
                          {"announce_4096_ms", announce_ms},
                          {"announce_4096_datagrams", announce_datagrams},
                          {"failed", lost.load()}});
}

/// A folder for a record store, removed at the end.
class StoreFolder {
 public:
  StoreFolder() : path_((std::filesystem::temp_directory_path() / "dmoe-bench-XXXXXX").string()) {
    must(::mkdtemp(path_.data()) != nullptr, "cannot make a temporary directory");
  }
  ~StoreFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  StoreFolder(const StoreFolder&) = delete;
  StoreFolder& operator=(const StoreFolder&) = delete;
  const std::string& path() const noexcept { return path_; }

  struct Files {
    std::size_t all = 0;
    std::size_t sst = 0;
    std::size_t log = 0;  ///< What RocksDB writes for people; its write-ahead log has another name.
    double log_mb = 0;
    double mb = 0;
  };
  Files files() const {
    Files files;
    std::error_code gone;  // Compactions remove files meanwhile.
    for (std::filesystem::recursive_directory_iterator at(path_, gone), end; !gone && at != end; at.increment(gone)) {
      std::error_code ignored;
      if (!at->is_regular_file(ignored)) continue;
      const auto size = at->file_size(ignored);
      const double mb = ignored ? 0 : static_cast<double>(size) / 1e6;
      const auto name = at->path().filename().string();
      ++files.all;
      files.mb += mb;
      files.sst += at->path().extension() == ".sst" ? 1 : 0;
      if (!name.starts_with("LOG")) continue;
      ++files.log;
      files.log_mb += mb;
    }
    return files;
  }

 private:
  std::string path_;
};

constexpr std::size_t kRecords = 1'000'000;

dht::Key key_of(std::size_t i) { return dht::Key::of("record" + std::to_string(i)); }

/// A store on disk that takes any number of records from anybody.
std::unique_ptr<dht::RocksDbStore> open_store(const std::string& directory) {
  dht::StoreLimits limits;
  limits.max_records = 3 * kRecords;
  limits.max_bytes = 3UL << 30U;
  limits.max_records_per_publisher = limits.max_records;
  limits.max_bytes_per_publisher = limits.max_bytes;
  limits.max_records_per_host = limits.max_records;
  auto opened = dht::RocksDbStore::open(directory, limits);
  if (!opened.has_value()) throw std::runtime_error(describe(opened.error()));
  return std::move(*opened);
}

dht::Record sample_record() {
  dht::Record record;
  record.value.assign(100, 7);
  record.max_ttl_ms = 86'400'000;
  return record;
}

void put_patiently(dht::RocksDbStore& store, const dht::Record& record, SteadyClock::duration life) {
  while (store.put({record, SteadyClock::now() + life}, 1, SteadyClock::now()) == dht::PutOutcome::kFull) store.flush();
}

/// @return records per second.
double fill(dht::RocksDbStore& store, dht::Record& record) {
  const auto began = SteadyClock::now();
  for (std::size_t i = 0; i < kRecords; ++i) {
    record.key = key_of(i);
    record.publisher[0] = static_cast<std::uint8_t>(i);
    record.sequence = i;
    put_patiently(store, record, 20h);
  }
  store.flush();
  return kRecords / std::chrono::duration<double>(SteadyClock::now() - began).count();
}

void on_disk(const Options& options, Reporter& reporter) {
  const StoreFolder folder;
  const double before_kb = rss_kb();
  double written_per_s = 0;
  double read_per_s = 0;
  double rss_mb = 0;
  StoreFolder::Files files;
  {
    const auto opened = open_store(folder.path());
    auto& store = *opened;
    std::mt19937_64 random(options.seed);
    auto record = sample_record();
    written_per_s = fill(store, record);
    constexpr std::size_t kReads = 100'000;
    std::size_t found = 0;
    const auto began = SteadyClock::now();
    for (std::size_t i = 0; i < kReads; ++i) {
      found += store.visit(key_of(random() % kRecords), SteadyClock::now(), 0, [](const auto&) { return true; });
    }
    read_per_s = kReads / std::chrono::duration<double>(SteadyClock::now() - began).count();
    must(found == kReads, "a record on disk was not found");
    for (int i = 0; i < 70; ++i) store.purge(SteadyClock::now());
    must(store.stats().records == kRecords, "the store miscounts its records");
    rss_mb = (rss_kb() - before_kb) / 1'024;
    files = folder.files();
  }
  reporter.report("dht", {{"store", "rocksdb"},
                          {"records", kRecords},
                          {"records_written_per_s", written_per_s},
                          {"records_read_per_s", read_per_s},
                          {"rss_mb", rss_mb},
                          {"files", files.all},
                          {"sst_files", files.sst},
                          {"log_files", files.log}});
}

/// A million records of which one after another is renewed, as announcements are, while others come and expire, for
/// `--seconds`: the most memory and files that this ever takes.
void churn(const Options& options, Reporter& reporter) {
  constexpr std::size_t kPutsPerLook = 20'000;
  constexpr std::size_t kOfThemNew = 10;  ///< One in so many is a record that nobody renews.
  const StoreFolder folder;
  const double before_kb = rss_kb();
  double rss_mb = 0;
  StoreFolder::Files most;
  std::size_t renewed = 0;
  std::size_t expiring = 0;
  double seconds = 0;
  std::size_t records = 0;
  {
    const auto opened = open_store(folder.path());
    auto& store = *opened;
    std::mt19937_64 random(options.seed);
    auto record = sample_record();
    fill(store, record);
    const auto began = SteadyClock::now();
    auto purged = began;
    for (; seconds < options.seconds; seconds = std::chrono::duration<double>(SteadyClock::now() - began).count()) {
      for (std::size_t i = 0; i < kPutsPerLook; ++i) {
        ++record.sequence;
        const bool brief = i % kOfThemNew == 0;
        const auto which = random() % kRecords;
        record.key = brief ? dht::Key::of("brief" + std::to_string(expiring++)) : key_of(which);
        record.publisher[0] = static_cast<std::uint8_t>(which);  // Who wrote it before.
        renewed += brief ? 0 : 1;
        put_patiently(store, record, brief ? SteadyClock::duration(5s) : SteadyClock::duration(20h));
      }
      if (SteadyClock::now() - purged > 1s) {
        purged = SteadyClock::now();
        store.purge(purged);
      }
      rss_mb = std::max(rss_mb, (rss_kb() - before_kb) / 1'024);
      const auto now = folder.files();
      most.all = std::max(most.all, now.all);
      most.sst = std::max(most.sst, now.sst);
      most.log = std::max(most.log, now.log);
      most.log_mb = std::max(most.log_mb, now.log_mb);
      most.mb = std::max(most.mb, now.mb);
    }
    records = store.stats().records;
  }
  reporter.report("dht", {{"store", "rocksdb_churn"},
                          {"seconds", seconds},
                          {"records", records},
                          {"puts_per_s", static_cast<double>(renewed + expiring) / seconds},
                          {"most_rss_mb", rss_mb},
                          {"most_files", most.all},
                          {"most_sst_files", most.sst},
                          {"most_log_files", most.log},
                          {"most_log_mb", most.log_mb},
                          {"most_disk_mb", most.mb}});
}

}  // namespace

void dht_suite(const Options& options, Reporter& reporter) {
  if (!options.mode || *options.mode == "memory") loopback(options, reporter);
  if (!options.mode || *options.mode == "rocksdb") on_disk(options, reporter);
  if (options.mode && *options.mode == "rocksdb_churn") churn(options, reporter);
}

}  // namespace dmoe::bench
