// How many extra calls may be made.
#include "dmoe/hedge_budget.hpp"

#include "dmoe/usual_times.hpp"
#include "tests/support/catch.hpp"

namespace dmoe {
namespace {

using namespace std::chrono_literals;

TEST_CASE("extra calls are a share of the others and few can be saved up", "[dmoe][hedge]") {
  HedgeBudget budget;
  CHECK(budget.spend(3) == 0);
  budget.earn(40, 0.05);
  CHECK(budget.spend(5) == 2);
  CHECK(budget.spend(1) == 0);
  budget.earn(10'000, 0.05);
  CHECK(budget.spend(100) == static_cast<std::size_t>(HedgeBudget::kBurst));
  std::size_t spent = 0;
  for (int i = 0; i < 1'000; ++i) {
    budget.earn(10, 0.05);
    spent += budget.spend(10);
  }
  CHECK(spent >= 499);
  CHECK(spent <= 500);
}

TEST_CASE("of an expert's latest calls 95 in 100 took no longer than is said", "[dmoe][hedge]") {
  const ExpertUid uid{"ffn", {3}};
  UsualTimes times;
  CHECK_FALSE(times.at_most(uid).has_value());
  for (std::size_t i = 0; i < UsualTimes::kWindow; ++i) times.answered(uid, (1 + i) * 1ms);
  const auto longest = UsualTimes::kWindow * 1ms;
  CHECK(*times.at_most(uid) >= longest * 9 / 10);
  CHECK(*times.at_most(uid) <= longest);
  CHECK(*times.usual(uid) < *times.at_most(uid));
  for (std::size_t i = 0; i < UsualTimes::kWindow; ++i) times.answered(uid, 1ms);
  CHECK(*times.at_most(uid) == 1ms);
}

}  // namespace
}  // namespace dmoe
