// The DHT in a simulated wide-area network: seeded, so that the same command prints the same bytes.
#include "bench/suite.hpp"
#include "dht/expert_directory.hpp"
#include "tests/sim/liar.hpp"
#include "tests/sim/world.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

namespace dmoe::bench {
namespace {

using namespace std::chrono_literals;
using dht::TimePoint;

constexpr std::size_t kKeys = 400;
constexpr std::size_t kFinds = 1'000;
constexpr std::size_t kSelections = 40;
constexpr Coordinate kGrid = 16;
constexpr std::size_t kServers = 32;  // Of 8 experts each: 256 on the 16x16 grid.

double milliseconds(dht::Duration time) { return std::chrono::duration<double, std::milli>(time).count(); }

/// Three digits: enough, and the same on every machine.
double rounded(double value) { return std::round(value * 1'000) / 1'000; }

double middle(std::vector<double> samples, double share) { return rounded(percentile(samples, share)); }

class Scenario {
 public:
  Scenario(std::size_t nodes, std::uint64_t seed) : world_(seed) {
    // A join every few milliseconds, then quiet.
    world_.grow(nodes, std::max<dht::Duration>(2ms, 20s / static_cast<int>(nodes)), 60s);
    publish();
  }

  void kill(double share) {
    for (std::size_t i = 0; i < world_.size(); ++i) {
      if (world_.uniform() < share && i != 0) world_.host(i).kill();
    }
  }
  void lose(double share) { world_.model.loss = share; }
  void lie(double share) {
    for (std::size_t i = 0; i < world_.size(); ++i) {
      if (world_.uniform() >= share || i == 0) continue;
      sim::Host& host = world_.host(i);
      host.kill();
      host.cut_off = false;
      liars_.push_back(std::make_unique<sim::Liar>(host, world_, accomplices_));
      accomplices_.push_back(liars_.back()->info());
    }
  }

  nlohmann::ordered_json measure(const std::string& name) {
    const auto [find_times, success, datagrams] = finds();
    std::vector<double> cold;
    std::vector<double> warm;
    for (std::size_t i = 0; i < kSelections; ++i) {
      const auto [first, second] = select(some_node());
      cold.push_back(first);
      warm.push_back(second);
    }
    return {{"scenario", name},
            {"nodes", world_.size()},
            {"median_rtt_ms", rounded(2 * world_.model.median_one_way_ms)},
            {"find_p50_ms", middle(find_times, 0.5)},
            {"find_p99_ms", middle(find_times, 0.99)},
            {"find_success", success},
            {"datagrams_per_find", rounded(datagrams)},
            {"top4_cold_ms", middle(cold, 0.5)},
            {"top4_warm_ms", middle(warm, 0.5)}};
  }

 private:
  sim::Host& some_node() {
    while (true) {
      sim::Host& host = world_.host(world_.random() % world_.size());
      if (host.runs()) return host;
    }
  }

  static dht::Key key(std::size_t i) { return dht::Key::of("value" + std::to_string(i)); }

  void publish() {
    for (std::size_t i = 0; i < kKeys; ++i) {
      const auto stored = world_.store(some_node(), {key(i), {}, std::vector<std::uint8_t>(100, 7), 4h, false});
      if (!stored.has_value()) throw std::runtime_error(describe(stored.error()));
    }
    // 256 live experts of 32 servers, spread over the whole grid.
    std::size_t done = 0;
    for (std::size_t s = 0; s < kServers; ++s) {
      sim::Host& host = some_node();
      directories_.push_back(std::make_unique<dht::ExpertDirectory>(host.node()));
      std::vector<ExpertUid> uids;
      for (Coordinate e = 0; e < 8; ++e) {
        const auto cell = static_cast<Coordinate>(s * 8 + e);
        uids.push_back({"ffn", {cell % kGrid, cell / kGrid}});
      }
      directories_.back()->announce(std::move(uids), {{"203.0.113.5", 4040}}, 4h,
                                    [&done](Result<dht::AnnounceReport>) { ++done; });
    }
    world_.run_until([&] { return done == kServers; });
    directories_.clear();
  }

  struct Finds {
    std::vector<double> times;
    double success;
    double datagrams;
  };

  /// One after the other from random nodes.
  Finds finds() {
    Finds result{{}, 0, 0};
    std::size_t found_count = 0;
    std::size_t requests = 0;
    for (std::size_t i = 0; i < kFinds; ++i) {
      const TimePoint began = world_.now();
      const auto found = world_.find(some_node(), key(world_.random() % kKeys), {.deadline = began + 30s});
      result.times.push_back(milliseconds(world_.now() - began));
      found_count += found.has_value() && !found->records.empty() ? 1 : 0;
      if (found.has_value()) requests += found->requests;
    }
    result.success = static_cast<double>(found_count) / kFinds;
    result.datagrams = 2.0 * static_cast<double>(requests) / kFinds;  // Each with its answer.
    return result;
  }

  /// The best four of the grid by a product-key gate's logits, looked up cold; then again with what is cached.
  std::pair<double, double> select(sim::Host& host) {
    dht::ExpertDirectory directory(host.node());
    std::vector<double> row(kGrid);
    std::vector<double> column(kGrid);
    for (double& logit : row) logit = world_.uniform();
    for (double& logit : column) logit = world_.uniform();
    std::map<Coordinate, std::vector<Coordinate>> cache;
    const auto run = [&] {
      const TimePoint began = world_.now();
      std::size_t open = 0;
      while (true) {
        const auto wanted = still_wanted(row, column, cache);
        if (wanted.empty()) break;
        std::vector<ExpertPrefix> prefixes;
        for (const Coordinate i : wanted) prefixes.push_back({"ffn", {i}});
        open = 1;
        directory.list(prefixes, world_.now() + 30s, [&](std::vector<Result<dht::PrefixListing>> listings) {
          for (std::size_t at = 0; at < listings.size(); ++at) {
            auto& live = cache[wanted[at]];
            if (!listings[at].has_value()) continue;
            for (const auto& child : listings[at]->children) live.push_back(child.coordinate);
          }
          open = 0;
        });
        world_.run_until([&] { return open == 0; });
      }
      return milliseconds(world_.now() - began);
    };
    const double cold = run();
    return {cold, run()};
  }

  /// Rows that could still hold one of the best four: the bound of the exact beam search, all in one walk.
  static std::vector<Coordinate> still_wanted(const std::vector<double>& row, const std::vector<double>& column,
                                              const std::map<Coordinate, std::vector<Coordinate>>& cache) {
    std::vector<double> best;
    for (const auto& [i, live] : cache) {
      for (const Coordinate j : live) best.push_back(row[i] + column[j]);
    }
    std::sort(best.rbegin(), best.rend());
    const double fourth = best.size() >= 4 ? best[3] : -1e9;
    const double top_column = *std::max_element(column.begin(), column.end());
    std::vector<Coordinate> order(row.size());
    for (Coordinate i = 0; i < order.size(); ++i) order[i] = i;
    std::sort(order.begin(), order.end(), [&](Coordinate a, Coordinate b) { return row[a] > row[b]; });
    std::vector<Coordinate> wanted;
    for (const Coordinate i : order) {
      if (cache.contains(i) || row[i] + top_column <= fourth) continue;
      wanted.push_back(i);
    }
    return wanted;
  }

  sim::World world_;
  std::vector<std::unique_ptr<dht::ExpertDirectory>> directories_;
  std::vector<dht::wire::NodeInfo> accomplices_;
  std::vector<std::unique_ptr<sim::Liar>> liars_;
};

}  // namespace

void dht_sim_suite(const Options& options, Reporter& reporter) {
  const std::size_t nodes = options.nodes.value_or(100);
  {
    Scenario scenario(nodes, options.seed);
    reporter.report("dht-sim", scenario.measure("none"));
    scenario.lose(0.1);
    reporter.report("dht-sim", scenario.measure("loss10"));
    scenario.lose(0);
    scenario.kill(0.3);
    reporter.report("dht-sim", scenario.measure("dead30"));
  }
  Scenario scenario(nodes, options.seed);
  scenario.lie(0.2);
  reporter.report("dht-sim", scenario.measure("lying20"));
}

}  // namespace dmoe::bench
