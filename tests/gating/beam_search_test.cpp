#include "gating/beam_search.hpp"

#include "tests/gating/memory_directory.hpp"
#include "tests/support/catch.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <thread>

namespace dmoe::gating {
namespace {

using namespace std::chrono_literals;
using test::MemoryDirectory;
using test::server_address;

struct Logits {
  std::vector<std::vector<float>> dimensions;  // Each rows × grid_size[d].
  std::vector<const float*> pointers() const {
    std::vector<const float*> result;
    for (const auto& dimension : dimensions) result.push_back(dimension.data());
    return result;
  }
};

Logits random_logits(const std::vector<std::size_t>& grid, std::size_t rows, std::mt19937_64& random) {
  std::normal_distribution<float> normal;
  Logits logits;
  for (const auto size : grid) {
    auto& values = logits.dimensions.emplace_back(rows * size);
    for (auto& value : values) value = normal(random);
  }
  return logits;
}

/// Scores that tie often.
Logits coarse_logits(const std::vector<std::size_t>& grid, std::size_t rows, std::mt19937_64& random) {
  auto logits = random_logits(grid, rows, random);
  for (auto& dimension : logits.dimensions) {
    for (auto& value : dimension) value = std::round(value);
  }
  return logits;
}

float score(const Logits& logits, const std::vector<std::size_t>& grid, std::size_t row, const ExpertUid& uid) {
  float sum = 0;
  for (std::size_t d = 0; d < grid.size(); ++d) sum += logits.dimensions[d][row * grid[d] + uid.coordinates[d]];
  return sum;
}

std::vector<float> brute_force(const Logits& logits, const std::vector<std::size_t>& grid, std::size_t row,
                               const std::vector<ExpertUid>& experts, std::size_t k) {
  std::vector<float> scores;
  for (const auto& uid : experts) scores.push_back(score(logits, grid, row, uid));
  std::sort(scores.begin(), scores.end(), std::greater<>());
  scores.resize(std::min(scores.size(), k));
  return scores;
}

std::vector<ExpertUid> random_experts(const std::vector<std::size_t>& grid, std::size_t count,
                                      std::mt19937_64& random) {
  std::set<ExpertUid> uids;
  for (std::size_t i = 0; i < count; ++i) {
    ExpertUid uid{"ffn", {}};
    for (const auto size : grid) uid.coordinates.push_back(static_cast<Coordinate>(random() % size));
    uids.insert(std::move(uid));
  }
  return {uids.begin(), uids.end()};
}

std::shared_ptr<MemoryDirectory> directory_of(const std::vector<ExpertUid>& experts) {
  auto directory = std::make_shared<MemoryDirectory>();
  for (const auto& uid : experts) directory->add(uid, server_address(std::uint8_t(1 + uid.coordinates.back() % 5)));
  return directory;
}

BeamSearch::TimePoint soon() { return std::chrono::steady_clock::now() + 30s; }

std::vector<ExpertUid> chosen(const BeamResult& result, std::size_t row = 0) {
  std::vector<ExpertUid> uids;
  for (const auto& choice : result.row(row)) uids.push_back(result.expert(choice.expert).uid);
  return uids;
}

/// One row whose best cells are known: logit of coordinate i is size - i in each dimension.
Logits descending_logits(const std::vector<std::size_t>& grid) {
  Logits logits;
  for (const auto size : grid) {
    auto& values = logits.dimensions.emplace_back(size);
    for (std::size_t i = 0; i < size; ++i) values[i] = float(size - i);
  }
  return logits;
}

TEST_CASE("beam search finds the exact top k in random grids of 1 to 5 dimensions", "[gating][property]") {
  std::mt19937_64 random(test::seed());
  for (int round = 0; round < 150; ++round) {
    const std::size_t dimensions = 1 + random() % 5;
    std::vector<std::size_t> grid;
    std::size_t cells = 1;
    for (std::size_t d = 0; d < dimensions; ++d) cells *= grid.emplace_back(1 + random() % (dimensions > 3 ? 6 : 20));
    const auto experts = random_experts(grid, random() % std::min<std::size_t>(cells + 1, 200), random);
    const auto directory = directory_of(experts);
    BeamSearch search(directory, "ffn", grid);
    const std::size_t rows = 1 + random() % 12;
    const std::size_t k = 1 + random() % 6;
    for (int again = 0; again < 3; ++again) {
      const auto logits = again == 2 ? coarse_logits(grid, rows, random) : random_logits(grid, rows, random);
      const auto result = search.search(logits.pointers(), rows, k, soon());
      REQUIRE_FALSE(result.cut_short());
      if (dimensions <= 2 && again == 0) CHECK(result.rounds() <= 2);
      for (std::size_t row = 0; row < rows; ++row) {
        std::vector<float> scores;
        std::set<ExpertUid> distinct;
        for (const auto& choice : result.row(row)) {
          const auto& uid = result.expert(choice.expert).uid;
          CHECK(choice.score == score(logits, grid, row, uid));
          CHECK(std::binary_search(experts.begin(), experts.end(), uid));
          distinct.insert(uid);
          scores.push_back(choice.score);
        }
        CHECK(distinct.size() == scores.size());
        REQUIRE(scores == brute_force(logits, grid, row, experts, k));
      }
    }
  }
}

TEST_CASE("a cold search of a 2-d grid asks at most twice and a warm one not at all", "[gating][g4]") {
  std::mt19937_64 random(test::seed());
  const std::vector<std::size_t> grid{64, 64};
  const auto experts = random_experts(grid, 300, random);
  const auto directory = directory_of(experts);
  BeamSearch search(directory, "ffn", grid);
  const auto logits = random_logits(grid, 64, random);

  const auto cold = search.search(logits.pointers(), 64, 4, soon());
  CHECK(cold.rounds() <= 2);
  CHECK(directory->calls() == cold.rounds());
  CHECK(cold.lookups() == directory->lookups());
  const auto asked = directory->asked();
  for (const auto& prefix : asked) CHECK(asked.count(prefix) == 1);

  const auto warm = search.search(logits.pointers(), 64, 4, soon());
  CHECK(warm.rounds() == 0);
  CHECK(warm.lookups() == 0);
  CHECK(directory->calls() == cold.rounds());
  CHECK(chosen(warm, 7) == chosen(cold, 7));
}

TEST_CASE("every live expert is known after looking everywhere and then nothing more is asked", "[gating]") {
  std::mt19937_64 random(test::seed());
  for (const auto& grid : std::vector<std::vector<std::size_t>>{{40}, {16, 16}, {6, 5, 4}}) {
    const auto experts = random_experts(grid, 60, random);
    const auto directory = directory_of(experts);
    BeamSearch search(directory, "ffn", grid);
    CHECK(search.look_everywhere(soon()));
    const auto asked = search.total_lookups();
    const auto logits = random_logits(grid, 3, random);
    const auto result = search.search(logits.pointers(), 3, 1, soon());
    CHECK(result.experts() == experts.size());
    CHECK(search.look_everywhere(soon()));
    CHECK(search.total_lookups() == asked);
  }
}

TEST_CASE("a long second dimension costs lookups by first coordinate only", "[gating][g4]") {
  std::mt19937_64 random(test::seed());
  const std::vector<std::size_t> grid{3, 1000};
  const auto directory = directory_of(random_experts(grid, 900, random));
  BeamSearch search(directory, "ffn", grid);
  const auto logits = random_logits(grid, 32, random);
  const auto result = search.search(logits.pointers(), 32, 4, soon());
  CHECK(result.lookups() <= 4);
  CHECK(result.rounds() <= 2);
}

TEST_CASE("k above the number of live experts gives those that live", "[gating][c2]") {
  const std::vector<std::size_t> grid{8, 8};
  const auto directory = directory_of({{"ffn", {1, 1}}, {"ffn", {1, 7}}, {"ffn", {5, 0}}});
  BeamSearch search(directory, "ffn", grid);
  const auto result = search.search(descending_logits(grid).pointers(), 1, 8, soon());
  CHECK(chosen(result) == std::vector<ExpertUid>{{"ffn", {1, 1}}, {"ffn", {5, 0}}, {"ffn", {1, 7}}});
  CHECK_FALSE(result.cut_short());
}

TEST_CASE("an empty grid gives no expert and the absence is cached", "[gating][c1]") {
  const auto directory = std::make_shared<MemoryDirectory>();
  BeamSearch search(directory, "ffn", {8, 8});
  const auto logits = descending_logits({8, 8});
  CHECK(search.search(logits.pointers(), 1, 4, soon()).row(0).empty());
  const auto lookups = directory->lookups();
  const auto again = search.search(logits.pointers(), 1, 4, soon());
  CHECK(again.row(0).empty());
  CHECK(again.lookups() == 0);
  CHECK(directory->lookups() == lookups);
}

TEST_CASE("a listed prefix whose leaf is gone costs no result", "[gating][b12]") {
  const std::vector<std::size_t> grid{4, 4};
  const auto directory =
      directory_of({{"ffn", {0, 0}}, {"ffn", {1, 2}}, {"ffn", {2, 1}}, {"ffn", {3, 3}}, {"ffn", {3, 0}}});
  directory->remove({"ffn", {0, 0}}, false);
  BeamSearch search(directory, "ffn", grid);
  const auto result = search.search(descending_logits(grid).pointers(), 1, 4, soon());
  const auto uids = chosen(result);
  CHECK(uids.size() == 4);
  CHECK(std::find(uids.begin(), uids.end(), ExpertUid{"ffn", {0, 0}}) == uids.end());
}

TEST_CASE("experts that the root listing misses are found by their prefix", "[gating]") {
  const std::vector<std::size_t> grid{4, 4};
  const auto directory = directory_of({{"ffn", {0, 0}}, {"ffn", {1, 2}}, {"ffn", {2, 1}}});
  directory->forget({"ffn", {}}, 1);
  BeamSearch search(directory, "ffn", grid);
  const auto result = search.search(descending_logits(grid).pointers(), 1, 4, soon());
  CHECK(chosen(result).size() == 3);
}

TEST_CASE("masked and undefined scores are never chosen", "[gating]") {
  const std::vector<std::size_t> grid{2, 3};
  const auto directory = directory_of({{"ffn", {0, 0}}, {"ffn", {0, 1}}, {"ffn", {1, 2}}});
  BeamSearch search(directory, "ffn", grid);
  Logits logits;
  logits.dimensions = {{-std::numeric_limits<float>::infinity(), 0.5F},
                       {9.0F, std::numeric_limits<float>::quiet_NaN(), 0.25F}};
  const auto result = search.search(logits.pointers(), 1, 3, soon());
  CHECK(chosen(result) == std::vector<ExpertUid>{{"ffn", {1, 2}}});
}

TEST_CASE("searches at the same time share one lookup", "[gating]") {
  std::mt19937_64 random(test::seed());
  const std::vector<std::size_t> grid{16, 16};
  const auto directory = directory_of(random_experts(grid, 100, random));
  BeamSearch search(directory, "ffn", grid);
  const auto logits = random_logits(grid, 8, random);
  directory->hold();
  std::vector<std::thread> threads;
  std::vector<std::vector<ExpertUid>> found(4);
  for (std::size_t i = 0; i < found.size(); ++i) {
    threads.emplace_back([&, i] { found[i] = chosen(search.search(logits.pointers(), 8, 4, soon())); });
  }
  directory->wait_for_questions(1);
  directory->release();
  for (auto& thread : threads) thread.join();
  const auto asked = directory->asked();
  for (const auto& prefix : asked) CHECK(asked.count(prefix) == 1);
  for (const auto& uids : found) CHECK(uids == found[0]);
}

TEST_CASE("a listing in use is refreshed in the background before it runs out", "[gating]") {
  const std::vector<std::size_t> grid{2};
  const auto directory = directory_of({{"ffn", {0}}});
  BeamSearchOptions options;
  options.cache.ttl = 1ms;
  BeamSearch search(directory, "ffn", grid, options);
  const auto logits = descending_logits(grid);
  CHECK(chosen(search.search(logits.pointers(), 1, 2, soon())).size() == 1);
  directory->add({"ffn", {1}});
  // The search that starts a refresh answers from what it has; a later one sees the answer.
  std::size_t found = 1;
  while (found < 2) {
    const auto result = search.search(logits.pointers(), 1, 2, soon());
    CHECK(result.rounds() == 0);
    CHECK(result.lookups() == 0);
    found = result.row(0).size();
  }
  CHECK(search.total_lookups() > 1);
}

TEST_CASE("a listing that ran out is asked for again", "[gating][b1]") {
  const std::vector<std::size_t> grid{2};
  const auto directory = directory_of({{"ffn", {0}}});
  directory->expire_after(1ms);
  BeamSearchOptions options;
  options.cache.negative_ttl = 1ms;
  BeamSearch search(directory, "ffn", grid, options);
  const auto logits = descending_logits(grid);
  CHECK(search.search(logits.pointers(), 1, 1, soon()).row(0).size() == 1);
  directory->remove({"ffn", {0}});
  while (!search.search(logits.pointers(), 1, 1, soon()).row(0).empty()) std::this_thread::yield();
  CHECK(directory->lookups() >= 2);
}

TEST_CASE("experts stay in use while the directory itself is silent", "[gating]") {
  const std::vector<std::size_t> grid{2};
  const auto directory = directory_of({{"ffn", {0}}});
  directory->expire_after(1ms);
  BeamSearchOptions options;
  options.cache.negative_ttl = 1ms;
  options.cache.retry = 1ms;
  BeamSearch search(directory, "ffn", grid, options);
  const auto logits = descending_logits(grid);
  CHECK(search.search(logits.pointers(), 1, 1, soon()).row(0).size() == 1);
  directory->fail({"ffn", {}});
  while (directory->lookups() < 4) CHECK(search.search(logits.pointers(), 1, 1, soon()).row(0).size() == 1);
}

TEST_CASE("a silent directory holds a search no longer than its deadline", "[gating][g4]") {
  const std::vector<std::size_t> grid{8, 8};
  const auto directory = directory_of({{"ffn", {0, 0}}});
  directory->hold();
  BeamSearch search(directory, "ffn", grid);
  const auto deadline = std::chrono::steady_clock::now() + 20ms;
  const auto result = search.search(descending_logits(grid).pointers(), 1, 1, deadline);
  CHECK(std::chrono::steady_clock::now() >= deadline);
  CHECK(result.cut_short());
  CHECK(result.row(0).empty());
  directory->release();
  CHECK(search.search(descending_logits(grid).pointers(), 1, 1, soon()).row(0).size() == 1);
}

TEST_CASE("a time budget answers from what is known", "[gating][g4]") {
  const std::vector<std::size_t> grid{8, 8};
  const auto directory = directory_of({{"ffn", {0, 0}}, {"ffn", {1, 1}}});
  BeamSearchOptions options;
  options.time_budget = 10ms;
  BeamSearch search(directory, "ffn", grid, options);
  directory->hold();
  CHECK(search.search(descending_logits(grid).pointers(), 1, 1, soon()).cut_short());
  directory->release();
}

TEST_CASE("an unanswered prefix costs only what lies below it", "[gating]") {
  const std::vector<std::size_t> grid{4, 4};
  const auto directory = directory_of({{"ffn", {0, 0}}, {"ffn", {1, 1}}, {"ffn", {2, 2}}});
  directory->fail({"ffn", {0}});
  BeamSearch search(directory, "ffn", grid);
  const auto result = search.search(descending_logits(grid).pointers(), 1, 4, soon());
  CHECK(chosen(result) == std::vector<ExpertUid>{{"ffn", {1, 1}}, {"ffn", {2, 2}}});
  CHECK(result.cut_short());
  CHECK(result.unanswered() == 1);
}

TEST_CASE("without a root listing the best first coordinates are asked for directly", "[gating]") {
  std::mt19937_64 random(test::seed());
  const std::vector<std::size_t> grid{16, 16};
  const auto experts = random_experts(grid, 80, random);
  const auto directory = directory_of(experts);
  directory->fail({"ffn", {}});
  BeamSearch search(directory, "ffn", grid);
  const auto logits = random_logits(grid, 1, random);
  const auto result = search.search(logits.pointers(), 1, 4, soon());
  std::vector<float> scores;
  for (const auto& choice : result.row(0)) scores.push_back(choice.score);
  CHECK(scores == brute_force(logits, grid, 0, experts, 4));
  CHECK(result.rounds() <= 2);
}

TEST_CASE("a beam width caps the lookups and says so", "[gating]") {
  std::mt19937_64 random(test::seed());
  const std::vector<std::size_t> grid{64, 64};
  const auto directory = directory_of(random_experts(grid, 500, random));
  BeamSearchOptions options;
  options.beam_width = 2;
  BeamSearch search(directory, "ffn", grid, options);
  const auto logits = random_logits(grid, 1, random);
  const auto result = search.search(logits.pointers(), 1, 8, soon());
  CHECK(result.lookups() <= 1 + 2 * grid.size());
  CHECK(result.cut_short());
}

TEST_CASE("a cap on lookups holds over all rounds", "[gating]") {
  std::mt19937_64 random(test::seed());
  const std::vector<std::size_t> grid{64, 64};
  const auto directory = directory_of(random_experts(grid, 500, random));
  BeamSearchOptions options;
  options.max_lookups = 10;
  BeamSearch search(directory, "ffn", grid, options);
  const auto logits = random_logits(grid, 16, random);
  const auto result = search.search(logits.pointers(), 16, 4, soon());
  CHECK(directory->lookups() <= 10);
  CHECK(result.cut_short());
}

TEST_CASE("a banned expert is skipped until it announces itself again", "[gating][b25]") {
  const std::vector<std::size_t> grid{2, 2};
  const auto directory = std::make_shared<MemoryDirectory>();
  directory->add({"ffn", {0, 0}}, server_address(1, 7));
  directory->add({"ffn", {1, 1}}, server_address(2, 7));
  BeamSearchOptions options;
  options.cache.ttl = 1ms;
  BeamSearch search(directory, "ffn", grid, options);
  const auto logits = descending_logits(grid);
  const auto first = search.search(logits.pointers(), 1, 1, soon());
  REQUIRE(chosen(first) == std::vector<ExpertUid>{{"ffn", {0, 0}}});

  search.bans().ban_expert({"ffn", {0, 0}}, server_address(1, 7), std::chrono::steady_clock::now());
  CHECK(chosen(search.search(logits.pointers(), 1, 1, soon())) == std::vector<ExpertUid>{{"ffn", {1, 1}}});

  directory->add({"ffn", {0, 0}}, server_address(1, 8));
  while (chosen(search.search(logits.pointers(), 1, 1, soon())).front() != ExpertUid{"ffn", {0, 0}}) {
    std::this_thread::yield();
  }
}

TEST_CASE("a ban of a server covers all its experts and ends by time", "[gating][b25]") {
  const std::vector<std::size_t> grid{2, 2};
  const auto directory = std::make_shared<MemoryDirectory>();
  directory->add({"ffn", {0, 0}}, server_address(1));
  directory->add({"ffn", {0, 1}}, server_address(1));
  directory->add({"ffn", {0, 1}}, server_address(2));
  directory->add({"ffn", {1, 1}}, server_address(2));
  auto bans = std::make_shared<BanList>(20ms);
  BeamSearch search(directory, "ffn", grid, {}, bans);
  const auto logits = descending_logits(grid);
  CHECK(search.search(logits.pointers(), 1, 4, soon()).row(0).size() == 3);

  bans->ban_server(server_address(1), std::chrono::steady_clock::now() + 10min);
  const auto result = search.search(logits.pointers(), 1, 4, soon());
  CHECK(chosen(result) == std::vector<ExpertUid>{{"ffn", {0, 1}}, {"ffn", {1, 1}}});
  CHECK(result.expert(result.row(0)[0].expert).servers.size() == 1);

  bans->lift_server(server_address(1).peer);
  CHECK(search.search(logits.pointers(), 1, 4, soon()).row(0).size() == 3);

  bans->ban_server(server_address(1), std::chrono::steady_clock::now());
  while (search.search(logits.pointers(), 1, 4, soon()).row(0).size() < 3) std::this_thread::yield();
}

TEST_CASE("when every expert is banned they are tried anyway", "[gating][c19]") {
  const std::vector<std::size_t> grid{2, 2};
  const auto directory = directory_of({{"ffn", {0, 0}}, {"ffn", {1, 1}}});
  BeamSearch search(directory, "ffn", grid);
  const auto logits = descending_logits(grid);
  const auto now = std::chrono::steady_clock::now();
  for (std::uint8_t number = 1; number <= 5; ++number) search.bans().ban_server(server_address(number), now);
  CHECK(search.search(logits.pointers(), 1, 4, soon()).row(0).size() == 2);
}

TEST_CASE("only failures of the other side deserve a ban", "[gating][c19]") {
  CHECK_FALSE(deserves_ban(Errc::kInvalidArgument));
  CHECK_FALSE(deserves_ban(Errc::kCancelled));
  CHECK_FALSE(deserves_ban(Errc::kLost));
  CHECK(deserves_ban(Errc::kUnavailable));
  CHECK(deserves_ban(Errc::kDeadlineExceeded));
  CHECK(deserves_ban(Errc::kInternal));
}

TEST_CASE("bans stay bounded", "[gating]") {
  BanList bans;
  const auto now = std::chrono::steady_clock::now();
  for (Coordinate i = 0; i < 2000; ++i) bans.ban_expert({"ffn", {i}}, server_address(1), now, 0ms);
  bans.ban_expert({"ffn", {5000}}, server_address(1), now);
  CHECK(bans.view(now)->banned({"ffn", {5000}}, server_address(1)));
  CHECK_FALSE(bans.view(now)->banned({"ffn", {5}}, server_address(1)));
  CHECK(bans.view(now + 1h)->empty());
}

TEST_CASE("searches run on many threads while experts come and go", "[gating]") {
  std::mt19937_64 random(test::seed());
  const std::vector<std::size_t> grid{16, 16};
  const auto experts = random_experts(grid, 60, random);
  const auto directory = directory_of(experts);
  BeamSearchOptions options;
  options.cache.ttl = 1ms;
  options.cache.negative_ttl = 1ms;
  BeamSearch search(directory, "ffn", grid, options);
  const auto logits = random_logits(grid, 8, random);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 100; ++round) {
        const auto result = search.search(logits.pointers(), 8, 4, soon());
        for (std::size_t row = 0; row < 8; ++row) {
          for (const auto& choice : result.row(row)) (void)result.expert(choice.expert).servers.at(0)->endpoints.at(0);
        }
      }
    });
  }
  for (int round = 0; round < 50; ++round) {
    directory->remove(experts[random() % experts.size()]);
    directory->add(experts[random() % experts.size()], server_address(std::uint8_t(1 + round % 5), round));
    search.bans().ban_server(server_address(std::uint8_t(1 + round % 5), round), std::chrono::steady_clock::now());
  }
  for (auto& thread : threads) thread.join();
  CHECK(directory->calls() > 0);
}

TEST_CASE("a grid without name or sizes is refused", "[gating]") {
  const auto directory = std::make_shared<MemoryDirectory>();
  CHECK_THROWS(BeamSearch(directory, "3ffn", {4}));
  CHECK_THROWS(BeamSearch(directory, "ffn", {}));
  CHECK_THROWS(BeamSearch(directory, "ffn", {4, 0}));
}

}  // namespace
}  // namespace dmoe::gating
