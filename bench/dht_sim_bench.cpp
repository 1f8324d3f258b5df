// The DHT in a simulated wide-area network: seeded, so that the same command prints the same bytes.
#include "bench/suite.hpp"
#include "dht/expert_directory.hpp"
#include "tests/sim/liar.hpp"
#include "tests/sim/world.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace dmoe::bench {
namespace {

using namespace std::chrono_literals;
using dht::TimePoint;

constexpr std::size_t kKeys = 400;
constexpr std::size_t kFinds = 1'000;
constexpr std::size_t kSelections = 40;
constexpr Coordinate kGrid = 16;
constexpr std::size_t kServers = 32;         // Of 8 experts each: 256 on the 16x16 grid.
constexpr std::size_t kManyNodes = 10'000;   // From here on the network carries 16,384 experts of others as well.
constexpr Coordinate kOthersGrid = 128;      // Every cell is live.
constexpr std::size_t kOthersServers = 256;  // Of 64 experts each.
constexpr dht::Duration kFindSpacing = 10ms;
constexpr dht::Duration kSelectionSpacing = 100ms;

double milliseconds(dht::Duration time) { return std::chrono::duration<double, std::milli>(time).count(); }

/// Three digits: enough, and the same on every machine.
double rounded(double value) { return std::round(value * 1'000) / 1'000; }

double middle(std::vector<double> samples, double share) { return rounded(percentile(samples, share)); }

/// One selection of the best four of the grid by a product-key gate's logits. First all rows that could hold one of
/// them, in one walk (the bound of the exact beam search: at first these are all), then what is left, if anything.
class Selection {
 public:
  Selection(sim::World& world, sim::Host& host, std::string grid)
      : world_(world), directory_(host.node()), grid_(std::move(grid)), row_(kGrid), column_(kGrid) {
    for (double& logit : row_) logit = world.uniform();
    for (double& logit : column_) logit = world.uniform();
  }

  /// With what is cached: nothing at the first call.
  void start() {
    began_ = world_.now();
    took_.reset();
    step();
  }
  bool done() const { return took_.has_value(); }
  double took() const { return *took_; }

 private:
  void step() {
    const auto wanted = still_wanted();
    if (wanted.empty()) {
      took_ = milliseconds(world_.now() - began_);
      return;
    }
    std::vector<ExpertPrefix> prefixes;
    for (const Coordinate i : wanted) prefixes.push_back({grid_, {i}});
    directory_.list(prefixes, world_.now() + 30s, [this, wanted](std::vector<Result<dht::PrefixListing>> listings) {
      for (std::size_t at = 0; at < listings.size(); ++at) {
        auto& live = cache_[wanted[at]];
        if (!listings[at].has_value()) continue;
        for (const auto& child : listings[at]->children) live.push_back(child.coordinate);
      }
      step();
    });
  }

  /// Rows that could still hold one of the best four: the bound of the exact beam search, all in one walk.
  std::vector<Coordinate> still_wanted() const {
    std::vector<double> best;
    for (const auto& [i, live] : cache_) {
      for (const Coordinate j : live) best.push_back(row_[i] + column_[j]);
    }
    std::sort(best.rbegin(), best.rend());
    const double fourth = best.size() >= 4 ? best[3] : -1e9;
    const double top_column = *std::max_element(column_.begin(), column_.end());
    std::vector<Coordinate> order(row_.size());
    for (Coordinate i = 0; i < order.size(); ++i) order[i] = i;
    std::sort(order.begin(), order.end(), [&](Coordinate a, Coordinate b) { return row_[a] > row_[b]; });
    std::vector<Coordinate> wanted;
    for (const Coordinate i : order) {
      if (cache_.contains(i) || row_[i] + top_column <= fourth) continue;
      wanted.push_back(i);
    }
    return wanted;
  }

  sim::World& world_;
  dht::ExpertDirectory directory_;
  std::string grid_;
  std::vector<double> row_;
  std::vector<double> column_;
  std::map<Coordinate, std::vector<Coordinate>> cache_;
  TimePoint began_;
  std::optional<double> took_;
};

/// A settled network with values and experts in it, and what may then happen to it.
class Network {
 public:
  Network(std::size_t nodes, std::uint64_t seed) : world_(seed) {
    // Joins every few milliseconds, many of them under way at once, then as much quiet as everybody needs to look for
    // its neighbours once more.
    world_.grow(nodes, std::clamp<dht::Duration>(20s / static_cast<int>(nodes), 5ms, 200ms), 90s);
    publish();
    experts_ = 2 * kServers * 8;
    announce("ffn", kServers, 8, kGrid, false);
    announce("scattered", kServers, 8, kGrid, true);
    if (nodes < kManyNodes) return;
    experts_ = std::size_t{kOthersGrid} * kOthersGrid;
    announce("other", kOthersServers, experts_ / kOthersServers, kOthersGrid, false);
    experts_ += 2 * kServers * 8;
  }

  std::uint64_t datagrams() const { return world_.datagrams; }
  /// In the table of an average node.
  std::size_t contacts() {
    std::size_t all = 0;
    for (std::size_t i = 0; i < world_.size(); ++i) all += world_.host(i).node().stats().known_nodes;
    return all / world_.size();
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
    const auto [cold, warm] = selections("ffn");
    const auto scattered = selections("scattered").first;
    return {{"scenario", name},
            {"nodes", world_.size()},
            {"experts", experts_},
            {"median_rtt_ms", rounded(2 * world_.model.median_one_way_ms)},
            {"find_p50_ms", middle(find_times, 0.5)},
            {"find_p99_ms", middle(find_times, 0.99)},
            {"find_success", success},
            {"datagrams_per_find", rounded(datagrams)},
            {"top4_cold_ms", middle(cold, 0.5)},
            {"top4_warm_ms", middle(warm, 0.5)},
            {"top4_scattered_cold_ms", middle(scattered, 0.5)}};
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
    std::size_t done = 0;
    for (std::size_t i = 0; i < kKeys; ++i) {
      some_node().node().store({key(i), {}, std::vector<std::uint8_t>(100, 7), 4h, false},
                               [&done](const Result<dht::StoreReport>& stored) {
                                 if (!stored.has_value()) throw std::runtime_error(describe(stored.error()));
                                 ++done;
                               });
      world_.run_for(10ms);
    }
    world_.run_until([&] { return done == kKeys; });
  }

  /// Live experts in all cells of a square grid. A server's lie side by side in a row, as a pattern such as
  /// ffn.[3:4].[0:8] names them; or scattered, one in each of several rows, so that a row has many servers.
  void announce(const std::string& grid, std::size_t servers, std::size_t each, Coordinate side, bool scattered) {
    std::vector<std::unique_ptr<dht::ExpertDirectory>> directories;
    std::size_t done = 0;
    for (std::size_t s = 0; s < servers; ++s) {
      directories.push_back(std::make_unique<dht::ExpertDirectory>(some_node().node()));
      std::vector<ExpertUid> uids;
      for (std::size_t e = 0; e < each; ++e) {
        const auto cell = static_cast<Coordinate>(s * each + e);
        const Coordinate row = scattered ? cell % side : cell / side;
        uids.push_back({grid, {row, scattered ? cell / side : cell % side}});
      }
      directories.back()->announce(std::move(uids), {{"203.0.113.5", 4040}}, 4h,
                                   [&done](const Result<dht::AnnounceReport>&) { ++done; });
      world_.run_for(10ms);
    }
    world_.run_until([&] { return done == servers; });
  }

  struct Finds {
    std::vector<double> times;
    double success;
    double datagrams;
  };

  /// From random nodes, one begun every few milliseconds: the simulated network has room for all of them.
  Finds finds() {
    Finds result{{}, 0, 0};
    std::size_t found_count = 0;
    std::size_t requests = 0;
    for (std::size_t i = 0; i < kFinds; ++i) {
      const TimePoint began = world_.now();
      some_node().node().find(key(world_.random() % kKeys), {.deadline = began + 30s},
                              [&, began](const Result<dht::FindResult>& found) {
                                result.times.push_back(milliseconds(world_.now() - began));
                                found_count += found.has_value() && !found->records.empty() ? 1 : 0;
                                if (found.has_value()) requests += found->requests;
                              });
      world_.run_for(kFindSpacing);
    }
    world_.run_until([&] { return result.times.size() == kFinds; });
    result.success = static_cast<double>(found_count) / kFinds;
    result.datagrams = 2.0 * static_cast<double>(requests) / kFinds;  // Each with its answer.
    return result;
  }

  /// Times of selections from random nodes: cold, and again with what each of them has cached.
  std::pair<std::vector<double>, std::vector<double>> selections(const std::string& grid) {
    std::vector<std::unique_ptr<Selection>> all;
    std::vector<double> cold;
    std::vector<double> warm;
    for (std::size_t i = 0; i < kSelections; ++i) {
      all.push_back(std::make_unique<Selection>(world_, some_node(), grid));
      all.back()->start();
      world_.run_for(kSelectionSpacing);
    }
    const auto all_done = [&] { return std::all_of(all.begin(), all.end(), [](const auto& s) { return s->done(); }); };
    world_.run_until(all_done);
    for (const auto& selection : all) {
      cold.push_back(selection->took());
      selection->start();
    }
    world_.run_until(all_done);
    for (const auto& selection : all) warm.push_back(selection->took());
    return {std::move(cold), std::move(warm)};
  }

  sim::World world_;
  std::size_t experts_ = 0;
  std::vector<dht::wire::NodeInfo> accomplices_;
  std::vector<std::unique_ptr<sim::Liar>> liars_;
};

/// Runs `measure` in a child process, which has the network as it is now to itself: every scenario starts from the same
/// settled network, which is built once.
nlohmann::ordered_json in_a_copy(const std::function<nlohmann::ordered_json()>& measure) {
  int ends[2];
  if (::pipe(ends) != 0) throw std::runtime_error("cannot make a pipe for a scenario's result");
  const pid_t child = ::fork();
  if (child < 0) throw std::runtime_error("cannot start a process for a scenario: no memory or process left");
  if (child == 0) {
    std::string text;
    try {
      text = measure().dump();
    } catch (const std::exception&) {
      ::_exit(1);
    }
    for (std::size_t at = 0; at < text.size();) {
      const auto written = ::write(ends[1], text.data() + at, text.size() - at);
      if (written <= 0) ::_exit(1);
      at += static_cast<std::size_t>(written);
    }
    ::_exit(0);
  }
  ::close(ends[1]);
  std::string text;
  char buffer[4'096];
  for (ssize_t got = 0; (got = ::read(ends[0], buffer, sizeof buffer)) > 0;)
    text.append(buffer, static_cast<std::size_t>(got));
  ::close(ends[0]);
  int status = 0;
  if (::waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    throw std::runtime_error("a scenario of the simulation failed");
  }
  return nlohmann::ordered_json::parse(text);
}

}  // namespace

void dht_sim_suite(const Options& options, Reporter& reporter) {
  const std::size_t nodes = options.nodes.value_or(100);
  Network network(nodes, options.seed);
  reporter.note(std::to_string(network.datagrams()) + " datagrams until the network was settled and filled, " +
                std::to_string(network.contacts()) + " contacts a node");
  const std::pair<std::string, std::function<void()>> scenarios[] = {
      {"none", [] {}},
      {"dead30", [&] { network.kill(0.3); }},
      {"loss10", [&] { network.lose(0.1); }},
      {"lying20", [&] { network.lie(0.2); }},
  };
  for (const auto& [name, happen] : scenarios) {
    if (options.mode && *options.mode != name) continue;
    reporter.report("dht-sim", in_a_copy([&, &name = name, &happen = happen] {
                      happen();
                      return network.measure(name);
                    }));
  }
}

}  // namespace dmoe::bench
