// No order of beginnings and ends makes a step staler than the bound.
#include "dmoe/staleness_bound.hpp"

#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"

#include <algorithm>
#include <random>
#include <vector>

namespace dmoe {
namespace {

TEST_CASE("steps in any order stay within the bound and all are applied", "[dmoe]") {
  std::mt19937 random(test::seed());
  for (int round = 0; round < 200; ++round) {
    const std::uint64_t limit = random() % 12;
    StalenessBound bound(limit);
    std::vector<std::uint64_t> running;
    std::vector<std::uint64_t> finished;
    std::size_t begun = 0;
    std::size_t applied = 0;
    const auto apply_what_may_be = [&] {
      for (bool more = true; more;) {
        std::sort(finished.begin(), finished.end());
        const auto next = std::find_if(finished.begin(), finished.end(), [&](auto s) { return bound.may_apply(s); });
        more = next != finished.end();
        if (!more) break;
        REQUIRE_FALSE(bound.exceeded(*next));
        bound.apply(*next);
        finished.erase(next);
        ++applied;
      }
    };
    for (int i = 0; i < 300; ++i) {
      const auto what = random() % 3;
      // A copy of the weights may be one update behind.
      const std::uint64_t seen = bound.version() - (bound.version() > 0 ? random() % 2 : 0);
      if (what == 0 && bound.may_begin(seen)) {
        bound.begin(seen);
        running.push_back(seen);
        ++begun;
      } else if (what == 1 && !running.empty()) {
        const auto it = running.begin() + static_cast<std::ptrdiff_t>(random() % running.size());
        finished.push_back(*it);
        running.erase(it);
      } else if (what == 2 && !running.empty() && random() % 8 == 0) {
        bound.end(running.back());  // It failed.
        running.pop_back();
        --begun;
      }
      apply_what_may_be();
      REQUIRE(running.size() + finished.size() <= limit + 1);
    }
    finished.insert(finished.end(), running.begin(), running.end());
    apply_what_may_be();
    CHECK(finished.empty());
    CHECK(applied == begun);
    CHECK(bound.version() == applied);
  }
}

TEST_CASE("a bound of zero lets one step be open at a time", "[dmoe]") {
  StalenessBound bound(0);
  REQUIRE(bound.may_begin(0));
  bound.begin(0);
  CHECK_FALSE(bound.may_begin(0));
  bound.apply(0);
  CHECK_FALSE(bound.may_begin(0));  // It would see weights that are one update old.
  CHECK(bound.may_begin(1));
}

TEST_CASE("a finished step waits where a slower one would become too stale", "[dmoe]") {
  StalenessBound bound(2);
  bound.begin(0);  // The slow one.
  for (int i = 0; i < 2; ++i) {
    const auto seen = bound.version();
    bound.begin(seen);
    REQUIRE(bound.may_apply(seen));
    bound.apply(seen);
  }
  bound.begin(2);
  CHECK_FALSE(bound.may_apply(2));
  bound.apply(0);
  CHECK(bound.may_apply(2));
}

}  // namespace
}  // namespace dmoe
