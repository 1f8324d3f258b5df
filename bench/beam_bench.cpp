// Beam search against brute force over the same live experts.
#include "bench/suite.hpp"
#include "gating/beam_search.hpp"

#include <algorithm>
#include <chrono>
#include <map>
#include <numeric>
#include <random>
#include <set>

namespace dmoe::bench {
namespace {

using Clock = std::chrono::steady_clock;
using Grid = std::vector<std::size_t>;

constexpr std::size_t kLiveExperts = 1'024;
constexpr std::size_t kRows = 64;
constexpr std::size_t kBest = 4;
constexpr std::size_t kAnnouncers = 8;

std::vector<ExpertUid> random_experts(const Grid& grid, std::mt19937_64& random) {
  std::size_t cells = 1;
  for (const auto size : grid) cells *= size;
  std::set<ExpertUid> uids;
  while (uids.size() < std::min(kLiveExperts, cells)) {
    ExpertUid uid{"ffn", {}};
    for (const auto size : grid) uid.coordinates.push_back(static_cast<Coordinate>(random() % size));
    uids.insert(std::move(uid));
  }
  return {uids.begin(), uids.end()};
}

/// Answers at once from memory: what is timed is the search, what is counted is what it asks for.
class Directory final : public dht::PrefixResolver {
 public:
  explicit Directory(const std::vector<ExpertUid>& experts) {
    for (std::size_t i = 0; i < kAnnouncers; ++i) {
      auto server = std::make_shared<dht::ServerAddress>();
      server->peer.bytes.fill(static_cast<std::uint8_t>(i + 1));
      server->endpoints = {{"127.0.0.1", static_cast<std::uint16_t>(i + 1)}};
      servers_.push_back(std::move(server));
    }
    for (std::size_t i = 0; i < experts.size(); ++i) {
      ExpertPrefix prefix{experts[i].grid, {}};
      for (const auto coordinate : experts[i].coordinates) {
        children_[prefix].insert({coordinate, servers_[i % kAnnouncers]});
        prefix.coordinates.push_back(coordinate);
      }
    }
  }

  void list(std::vector<ExpertPrefix> prefixes, Clock::time_point /*deadline*/, Handler handler) override {
    ++messages_;
    std::vector<Result<dht::PrefixListing>> results;
    for (const auto& prefix : prefixes) {
      dht::PrefixListing listing;
      listing.expires = Clock::now() + std::chrono::hours(1);
      for (const auto& [coordinate, server] : children_[prefix]) listing.children.push_back({coordinate, {server}});
      results.emplace_back(std::move(listing));
    }
    handler(std::move(results));
  }

  std::size_t messages() const noexcept { return messages_; }

 private:
  std::vector<std::shared_ptr<const dht::ServerAddress>> servers_;
  std::map<ExpertPrefix, std::map<Coordinate, std::shared_ptr<const dht::ServerAddress>>> children_;
  std::size_t messages_ = 0;
};

struct Batch {
  std::vector<std::vector<float>> logits;
  std::vector<const float*> pointers;
};

Batch random_batch(const Grid& grid, std::mt19937_64& random) {
  std::normal_distribution<float> normal;
  Batch batch;
  for (const auto size : grid) {
    auto& values = batch.logits.emplace_back(kRows * size);
    for (auto& value : values) value = normal(random);
    batch.pointers.push_back(values.data());
  }
  return batch;
}

/// Scores of the true top k of each row.
std::vector<std::vector<float>> brute_force(const Grid& grid, const std::vector<ExpertUid>& experts,
                                            const Batch& batch) {
  std::vector<std::vector<float>> best(kRows);
  std::vector<float> scores(experts.size());
  for (std::size_t row = 0; row < kRows; ++row) {
    for (std::size_t e = 0; e < experts.size(); ++e) {
      scores[e] = 0;
      for (std::size_t d = 0; d < grid.size(); ++d) {
        scores[e] += batch.logits[d][row * grid[d] + experts[e].coordinates[d]];
      }
    }
    const auto k = std::min(kBest, scores.size());
    std::partial_sort(scores.begin(), scores.begin() + std::ptrdiff_t(k), scores.end(), std::greater<>());
    best[row].assign(scores.begin(), scores.begin() + std::ptrdiff_t(k));
  }
  return best;
}

double recall(const gating::BeamResult& result, const std::vector<std::vector<float>>& truth) {
  std::size_t hits = 0;
  std::size_t wanted = 0;
  for (std::size_t row = 0; row < kRows; ++row) {
    wanted += truth[row].size();
    for (const auto& choice : result.row(row)) hits += choice.score >= truth[row].back() ? 1U : 0U;
  }
  return static_cast<double>(hits) / static_cast<double>(wanted);
}

template <class F>
double median_us(double seconds, F&& run) {
  std::vector<double> samples;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  while (Clock::now() < end || samples.size() < 10) {
    const auto start = Clock::now();
    run();
    samples.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
  }
  return percentile(samples, 0.5);
}

void measure(const Grid& grid, const Options& options, Reporter& reporter) {
  std::mt19937_64 random(options.seed);
  const auto experts = random_experts(grid, random);
  const auto directory = std::make_shared<Directory>(experts);
  gating::BeamSearch search(directory, "ffn", grid);
  const auto deadline = [] { return Clock::now() + std::chrono::seconds(10); };

  const auto first = random_batch(grid, random);
  const auto cold_start = Clock::now();
  const auto cold = search.search(first.pointers, kRows, kBest, deadline());
  const double cold_us = std::chrono::duration<double, std::micro>(Clock::now() - cold_start).count();
  const auto messages = directory->messages();

  std::vector<Batch> batches;
  for (int i = 0; i < 16; ++i) batches.push_back(random_batch(grid, random));
  double worst_recall = recall(cold, brute_force(grid, experts, first));
  for (const auto& batch : batches) {
    const auto result = search.search(batch.pointers, kRows, kBest, deadline());
    worst_recall = std::min(worst_recall, recall(result, brute_force(grid, experts, batch)));
  }
  const auto warm_messages = directory->messages();
  std::size_t next = 0;
  const double warm_us = median_us(options.seconds, [&] {
    (void)search.search(batches[next++ % batches.size()].pointers, kRows, kBest, deadline());
  });
  const double brute_us =
      median_us(options.seconds / 2, [&] { (void)brute_force(grid, experts, batches[next++ % batches.size()]); });
  std::string name;
  for (const auto size : grid) name += (name.empty() ? "" : ",") + std::to_string(size);
  reporter.report("beam", {{"grid", name},
                           {"live_experts", experts.size()},
                           {"batch", kRows},
                           {"k", kBest},
                           {"warm_p50_us", warm_us},
                           {"brute_force_p50_us", brute_us},
                           {"cold_us", cold_us},
                           {"cold_lookups", cold.lookups()},
                           {"cold_rounds", cold.rounds()},
                           {"recall_at_4", worst_recall},
                           {"messages", messages},
                           {"warm_messages", directory->messages() - warm_messages}});
}

}  // namespace

void beam_suite(const Options& options, Reporter& reporter) {
  std::vector<Grid> grids;
  for (const auto& grid : options.grids) grids.emplace_back(grid.begin(), grid.end());
  if (grids.empty()) grids = {{32, 32}, {256, 256}};
  for (const auto& grid : grids) measure(grid, options, reporter);
}

}  // namespace dmoe::bench
