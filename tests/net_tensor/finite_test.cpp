#include "net/tensor_finite.hpp"
#include "tests/support/catch.hpp"

#include <torch/types.h>
#include <torch/utils.h>

#include <limits>

namespace dmoe {
namespace {

TEST_CASE("finite numbers are told from NaN and infinity at any place", "[finite]") {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    for (const std::int64_t place : {0, 6, 12}) {
      auto values = torch::full({13}, -3.0e38F);
      CHECK(net::all_finite(values));
      values[place] = bad;
      CHECK_FALSE(net::all_finite(values));
      CHECK_FALSE(net::all_finite(values.to(at::kDouble)));
      CHECK_FALSE(net::all_finite(values.view({13, 1}).expand({13, 3})));
    }
  }
  CHECK(net::all_finite(torch::full({3}, 1, at::kLong)));
}

}  // namespace
}  // namespace dmoe
