// When a call counts as slow, and how many extra ones may be made.
#include "dmoe/call_times.hpp"

#include "tests/support/catch.hpp"

namespace dmoe {
namespace {

using namespace std::chrono_literals;

const ExpertUid kExpert{"ffn", {3}};

TEST_CASE("nothing is slow before an expert is known", "[dmoe][hedge]") {
  CallTimes times;
  for (std::size_t i = 0; i + 1 < CallTimes::kEnough; ++i) {
    times.answered(kExpert, 100ms);
    CHECK_FALSE(times.slow_after(kExpert));
  }
  times.answered(kExpert, 100ms);
  REQUIRE(times.slow_after(kExpert));
  CHECK(*times.slow_after(kExpert) == 200ms);
  CHECK_FALSE(times.slow_after({"ffn", {4}}));
}

TEST_CASE("a call is slow beyond twice the usual and the latest calls say what is usual", "[dmoe][hedge]") {
  CallTimes times;
  for (std::size_t i = 0; i < 100; ++i)
    times.answered(kExpert, i % 25 == 0 ? 5'000ms : 100ms);  // One in 25: no matter.
  CHECK(*times.slow_after(kExpert) <= 10'000ms);
  for (std::size_t i = 0; i < CallTimes::kWindow; ++i) times.answered(kExpert, 40ms);
  CHECK(*times.slow_after(kExpert) == 80ms);
  for (std::size_t i = 0; i < CallTimes::kWindow; ++i) times.answered(kExpert, 1ms);
  CHECK(*times.slow_after(kExpert) == CallTimes::kLeast);
  times.answered(kExpert, 3'000ms);  // One of 32 lies beyond the percentile.
  CHECK(*times.slow_after(kExpert) == CallTimes::kLeast);
}

TEST_CASE("extra calls are a share of the others and few can be saved up", "[dmoe][hedge]") {
  CallTimes times;
  CHECK(times.spend(3) == 0);
  times.earn(40, 0.05);
  CHECK(times.spend(5) == 2);
  CHECK(times.spend(1) == 0);
  times.earn(10'000, 0.05);
  CHECK(times.spend(100) == static_cast<std::size_t>(CallTimes::kBurst));
  std::size_t spent = 0;
  for (int i = 0; i < 1'000; ++i) {
    times.earn(10, 0.05);
    spent += times.spend(10);
  }
  CHECK(spent >= 490);
  CHECK(spent <= 510);
}

}  // namespace
}  // namespace dmoe
