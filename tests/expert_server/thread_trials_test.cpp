// The number of compute threads that trials settle on, on a machine that is simulated.
#include "expert_server/thread_trials.hpp"

#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"

#include <cmath>
#include <functional>
#include <random>

using namespace dmoe::expert_server;

namespace {

constexpr int kBatches = 20'000;

struct Outcome {
  int threads;        ///< After kBatches.
  double efficiency;  ///< The time of the second half with `best` threads, over what it took.
};

/// @param cost  the time of a batch with so many threads. Scheduling makes each up to a third longer, and one of fifty
/// five times as long. What a batch is expected to take is a moving average, as in a TaskPool.
Outcome run(const std::function<int()>& guess, const std::function<double(int)>& cost, int best) {
  ThreadTrials trials;
  std::mt19937_64 random(dmoe::test::seed());
  std::uniform_real_distribution<double> noise(1, 1.33);
  double expected = 0;
  double took = 0;
  double ideal = 0;
  int threads = 0;
  for (int batch = 0; batch < kBatches; ++batch) {
    threads = trials.threads(guess());
    const double luck = noise(random) * (random() % 50 == 0 ? 5 : 1);
    const double time = cost(threads) * luck;
    if (expected > 0) trials.served(time / expected);
    expected = expected == 0 ? time : 0.98 * expected + 0.02 * time;
    if (batch < kBatches / 2) continue;
    took += time;
    ideal += cost(best) * luck;
  }
  return {threads, ideal / took};
}

}  // namespace

TEST_CASE("g1 a guess that is best is kept, and trials cost little", "[threads][g1]") {
  const auto cost = [](int threads) { return threads == 2 ? 1.0 : 1.8; };
  CHECK(run([] { return 2; }, cost, 2).efficiency > 0.92);
  const auto much = [](int threads) { return threads == 2 ? 1.0 : 5.0; };  // A few batches are enough to tell.
  CHECK(run([] { return 2; }, much, 2).efficiency > 0.92);
}

TEST_CASE("g1 a guess that is too high is corrected", "[threads][g1]") {
  const auto one = [](int threads) { return threads == 1 ? 1.0 : 1.3; };
  CHECK(run([] { return 2; }, one, 1).efficiency > 0.92);
  // Threads that wait for each other's cores are many times as slow.
  const auto contended = [](int threads) { return threads == 1 ? 1.0 : 5.0; };
  CHECK(run([] { return 2; }, contended, 1).efficiency > 0.92);
  const auto seven = [](int threads) { return 1 + 0.2 * std::abs(threads - 7); };
  CHECK(run([] { return 8; }, seven, 7).efficiency > 0.92);
}

TEST_CASE("g1 a guess that changes again and again does not undo what was found", "[threads][g1]") {
  int calls = 0;
  const auto guess = [&calls] { return ++calls / 200 % 2 + 1; };
  const auto one = [](int threads) { return threads == 1 ? 1.0 : 1.3; };
  CHECK(run(guess, one, 1).efficiency > 0.9);
}

TEST_CASE("g1 one thread is the fewest, and the guess the most", "[threads][g1]") {
  const auto outcome = run([] { return 1; }, [](int threads) { return threads == 1 ? 1.0 : 1e9; }, 1);
  CHECK(outcome.threads == 1);
  CHECK(outcome.efficiency == 1);
}

TEST_CASE("what takes no time, or is no number, tells nothing", "[threads]") {
  ThreadTrials trials;
  for (int i = 0; i < 1'000; ++i) {
    trials.served(0);
    trials.served(std::nan(""));
    trials.served(-1);
    REQUIRE(trials.threads(2) == 2);
  }
}
