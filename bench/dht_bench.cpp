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

void on_disk(const Options& options, Reporter& reporter) {
  constexpr std::size_t kRecords = 1'000'000;
  std::string directory = (std::filesystem::temp_directory_path() / "dmoe-bench-XXXXXX").string();
  must(::mkdtemp(directory.data()) != nullptr, "cannot make a temporary directory");
  const double before_kb = rss_kb();
  double written_per_s = 0;
  double read_per_s = 0;
  double rss_mb = 0;
  std::size_t files = 0;
  {
    dht::StoreLimits limits;
    limits.max_records = 2 * kRecords;
    limits.max_bytes = 2UL << 30U;
    limits.max_records_per_publisher = 2 * kRecords;
    limits.max_bytes_per_publisher = 2UL << 30U;
    limits.max_records_per_host = 2 * kRecords;
    auto opened = dht::RocksDbStore::open(directory, limits);
    if (!opened.has_value()) throw std::runtime_error(describe(opened.error()));
    auto& store = **opened;
    std::mt19937_64 random(options.seed);
    dht::Record record;
    record.value.assign(100, 7);
    record.max_ttl_ms = 86'400'000;
    const auto key_of = [](std::size_t i) { return dht::Key::of("record" + std::to_string(i)); };
    auto began = SteadyClock::now();
    for (std::size_t i = 0; i < kRecords; ++i) {
      record.key = key_of(i);
      record.publisher[0] = static_cast<std::uint8_t>(i);
      record.sequence = i;
      while (store.put({record, SteadyClock::now() + 20h}, 1, SteadyClock::now()) == dht::PutOutcome::kFull)
        store.flush();
    }
    store.flush();
    written_per_s = kRecords / std::chrono::duration<double>(SteadyClock::now() - began).count();
    constexpr std::size_t kReads = 100'000;
    std::size_t found = 0;
    began = SteadyClock::now();
    for (std::size_t i = 0; i < kReads; ++i) {
      found += store.visit(key_of(random() % kRecords), SteadyClock::now(), 0, [](const auto&) { return true; });
    }
    read_per_s = kReads / std::chrono::duration<double>(SteadyClock::now() - began).count();
    must(found == kReads, "a record on disk was not found");
    for (int i = 0; i < 70; ++i) store.purge(SteadyClock::now());
    must(store.stats().records == kRecords, "the store miscounts its records");
    rss_mb = (rss_kb() - before_kb) / 1'024;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(directory))
      files += entry.is_regular_file() ? 1 : 0;
  }
  std::filesystem::remove_all(directory);
  reporter.report("dht", {{"store", "rocksdb"},
                          {"records", kRecords},
                          {"records_written_per_s", written_per_s},
                          {"records_read_per_s", read_per_s},
                          {"rss_mb", rss_mb},
                          {"files", files}});
}

}  // namespace

void dht_suite(const Options& options, Reporter& reporter) {
  if (!options.mode || *options.mode == "memory") loopback(options, reporter);
  if (!options.mode || *options.mode == "rocksdb") on_disk(options, reporter);
}

}  // namespace dmoe::bench
