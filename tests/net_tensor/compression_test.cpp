// Compressed tensors: error bounds, what is never compressed, and bytes of a hostile peer.
#include "net/tensor_codec.hpp"

#include "tests/net_tensor/arrived_frame.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"
#include "tests/support/text.hpp"

#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

using namespace dmoe;
using net::OutgoingFrame;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Passed {
  at::Tensor tensor;
  std::size_t bytes = 0;
  net::schema::Compression compression = net::schema::Compression::NONE;
};

Passed pass(const at::Tensor& tensor, Compression compression) {
  OutgoingFrame frame;
  const auto encoded =
      net::encode_tensor(tensor, frame.root().initReplies(1)[0].initForward(1)[0], frame.attachments(), compression);
  REQUIRE(encoded.has_value());
  const auto received = test::as_arrived(frame);
  const auto reader = received->root().getReplies()[0].getForward()[0];
  const auto decoded = net::decode_tensor(reader, received);
  INFO((decoded.has_error() ? decoded.error().message : ""));
  REQUIRE(decoded.has_value());
  return {*decoded, reader.getData().size(), reader.getCompression()};
}

/// Numbers of all magnitudes up to `largest`, zeros among them.
at::Tensor numbers(std::mt19937_64& random, std::int64_t count, float smallest, float largest) {
  std::uniform_real_distribution<float> exponent(std::log2(smallest), std::log2(largest));
  std::vector<float> values(static_cast<std::size_t>(count));
  for (auto& value : values) {
    value = std::min(std::exp2(exponent(random)), largest);
    if (random() % 2 == 0) value = -value;
    if (random() % 16 == 0) value = 0;
  }
  return torch::tensor(values);
}

/// A tensor by hand, as a hostile peer may write it.
Result<at::Tensor> decode(net::schema::DType type, std::uint16_t compression, const std::vector<std::int64_t>& shape,
                          const std::string& bytes) {
  OutgoingFrame frame;
  auto tensor = frame.root().initReplies(1)[0].initForward(1)[0];
  tensor.setDtype(type);
  tensor.setCompression(static_cast<net::schema::Compression>(compression));
  auto sizes = tensor.initShape(static_cast<unsigned>(shape.size()));
  for (unsigned i = 0; i < shape.size(); ++i) sizes.set(i, shape[i]);
  std::memcpy(tensor.initData(static_cast<unsigned>(bytes.size())).begin(), bytes.data(), bytes.size());
  const auto received = test::as_arrived(frame);
  return net::decode_tensor(received->root().getReplies()[0].getForward()[0], received);
}

constexpr std::int64_t kInt8BlockValues = 128;

std::int64_t expected_bytes(Compression compression, std::int64_t count) {
  if (compression == Compression::kNone) return 4 * count;
  if (compression == Compression::kInt8) return count + 4 * ((count + kInt8BlockValues - 1) / kInt8BlockValues);
  return 2 * count;
}

}  // namespace

TEST_CASE("compressed tensors keep shape and type and have the size that their format says", "[compression]") {
  for (const auto compression : kCompressions) {
    for (const auto& shape : std::vector<std::vector<std::int64_t>>{
             {1}, {3}, {127}, {128}, {129}, {3, 5}, {2, 3, 43}, {64, 1'024}, {0}, {4, 0, 2}, {}}) {
      const auto tensor = torch::randn(shape);
      const auto passed = pass(tensor, compression);
      INFO(to_string(compression) << " " << tensor.sizes());
      CHECK(passed.tensor.sizes() == tensor.sizes());
      CHECK(passed.tensor.scalar_type() == at::kFloat);
      CHECK(static_cast<std::int64_t>(passed.bytes) == expected_bytes(compression, tensor.numel()));
      if (compression == Compression::kNone) CHECK(torch::equal(passed.tensor, tensor));
    }
  }
}

TEST_CASE("sixteen bit formats round to the nearest as torch does", "[compression]") {
  std::mt19937_64 random(test::seed());
  const auto half = numbers(random, 100'003, 1e-9F, 65'504.0F);
  CHECK(torch::equal(pass(half, Compression::kFloat16).tensor, half.to(at::kHalf).to(at::kFloat)));
  const auto brain = numbers(random, 100'003, 1e-37F, 3.3e38F);
  CHECK(torch::equal(pass(brain, Compression::kBfloat16).tensor, brain.to(at::kBFloat16).to(at::kFloat)));
  // Every float16 number there is, and what lies between neighbours: ties go to the even one.
  auto all = torch::arange(0, 0x7C00, at::kInt).to(at::kShort).view(at::kHalf).to(at::kFloat);
  CHECK(torch::equal(pass(all, Compression::kFloat16).tensor, all));
  const auto between = (all.slice(0, 1) + all.slice(0, 0, -1)) / 2;
  CHECK(torch::equal(pass(between, Compression::kFloat16).tensor, between.to(at::kHalf).to(at::kFloat)));
  CHECK(torch::equal(pass(-between, Compression::kFloat16).tensor, (-between).to(at::kHalf).to(at::kFloat)));
}

TEST_CASE("errors stay within the bounds that each format promises", "[compression]") {
  std::mt19937_64 random(test::seed());
  for (int round = 0; round < 50; ++round) {
    const auto count = static_cast<std::int64_t>(1 + random() % 5'000);
    const float largest = std::exp2(static_cast<float>(random() % 200) - 110.0F);
    const auto x = numbers(random, count, largest / 4'096, largest);
    INFO("largest " << largest << ", " << count << " values");
    const auto brain = pass(x, Compression::kBfloat16).tensor;
    CHECK(((brain - x).abs() <= x.abs() / 256).all().item<bool>());

    if (largest <= 65'504) {
      const auto half = pass(x, Compression::kFloat16).tensor;
      const auto bound = torch::maximum(x.abs() / 2'048, torch::full({1}, std::exp2(-25.0F)));
      CHECK(((half - x).abs() <= bound).all().item<bool>());
    }

    const auto coded = pass(x, Compression::kInt8).tensor;
    for (std::int64_t first = 0; first < count; first += kInt8BlockValues) {
      const auto block = x.slice(0, first, std::min(count, first + kInt8BlockValues));
      const auto error = (coded.slice(0, first, std::min(count, first + kInt8BlockValues)) - block).abs().max();
      const auto bound = block.abs().max().item<double>() / 254 * 1.0001;
      CHECK(error.item<double>() <= std::max(bound, 127 * double{std::numeric_limits<float>::min()}));
    }
  }
}

TEST_CASE("the same values are coded alike each time", "[compression]") {
  const auto x = torch::randn({33, 65});
  for (const auto compression : kCompressions) {
    CHECK(torch::equal(pass(x, compression).tensor, pass(x.clone(), compression).tensor));
    CHECK(torch::equal(pass(x.t(), compression).tensor, pass(x.t().contiguous(), compression).tensor));
  }
}

TEST_CASE("extreme values survive", "[compression]") {
  const float most = std::numeric_limits<float>::max();
  const float least = std::numeric_limits<float>::denorm_min();
  for (const auto compression : {Compression::kBfloat16, Compression::kInt8}) {
    for (const auto& values :
         std::vector<std::vector<float>>{{0, -0.0F}, {least, -least}, {1e38F, -1e38F, 1e-38F}, {-3.38e38F, 1}}) {
      const auto x = torch::tensor(values);
      const auto passed = pass(x, compression).tensor;
      CHECK(torch::isfinite(passed).all().item<bool>());
      const double vanishing = 127 * double{std::numeric_limits<float>::min()};
      CHECK((passed - x).abs().max().item<double>() <= x.abs().max().item<double>() / 250 + vanishing);
    }
  }
  const auto largest = torch::tensor({most, -most, most / 2});
  CHECK(pass(largest, Compression::kBfloat16).compression == net::schema::Compression::NONE);  // It would become Inf.
  CHECK(pass(largest, Compression::kInt8).compression == net::schema::Compression::NONE);      // Likewise.
  const auto coded = pass(largest / 2.0001, Compression::kInt8);
  CHECK(coded.compression == net::schema::Compression::INT8);
  CHECK(torch::isfinite(coded.tensor).all().item<bool>());
}

TEST_CASE("a value that the format cannot hold makes its tensor travel as it is", "[compression]") {
  for (const float value : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
    for (const auto compression : kCompressions) {
      auto x = torch::randn({500});
      x[371] = value;
      const auto passed = pass(x, compression);
      CHECK(passed.compression == net::schema::Compression::NONE);
      CHECK(std::memcmp(passed.tensor.data_ptr(), x.data_ptr(), x.nbytes()) == 0);
    }
  }
  const auto large = torch::tensor({1.0F, 65'505.0F});
  CHECK(torch::equal(pass(large, Compression::kFloat16).tensor, large));
  const auto fits = torch::tensor({1.0F, -65'504.0F});
  CHECK(pass(fits, Compression::kFloat16).compression == net::schema::Compression::FLOAT16);
}

TEST_CASE("only float32 is compressed", "[compression]") {
  for (const auto type : {at::kHalf, at::kBFloat16, at::kDouble, at::kLong, at::kInt, at::kByte, at::kBool}) {
    const auto x = (torch::rand({5, 40}) * 100).to(type);
    for (const auto compression : kCompressions) {
      const auto passed = pass(x, compression);
      CHECK(passed.compression == net::schema::Compression::NONE);
      CHECK(passed.tensor.scalar_type() == type);
      CHECK(torch::equal(passed.tensor, x));
    }
  }
}

TEST_CASE("f6 compressed bytes of a hostile peer are refused or decoded within their bounds", "[compression][f6]") {
  using net::schema::DType;
  constexpr std::uint16_t kHalf = 1;
  constexpr std::uint16_t kBrain = 2;
  constexpr std::uint16_t kInt8 = 3;
  const auto zeros = [](std::size_t count) { return std::string(count, '\0'); };
  CHECK(decode(DType::FLOAT32, kHalf, {4}, zeros(8)).has_value());
  CHECK(decode(DType::FLOAT32, kInt8, {129}, zeros(129 + 8)).has_value());
  CHECK(decode(DType::FLOAT32, kInt8, {0, 7}, {}).has_value());
  CHECK(decode(DType::FLOAT32, kInt8, {}, zeros(5)).has_value());  // A scalar.

  // Too few bytes, too many, another format's, none.
  for (const std::size_t size : {0, 1, 7, 9, 16}) CHECK(decode(DType::FLOAT32, kHalf, {4}, zeros(size)).has_error());
  for (const std::size_t size : {0, 128, 132, 136, 138}) {
    CHECK(decode(DType::FLOAT32, kInt8, {129}, zeros(size)).has_error());
  }
  // Shapes that overflow, are negative, or ask for memory that no bytes stand for.
  for (const auto compression : {kHalf, kBrain, kInt8}) {
    CHECK(decode(DType::FLOAT32, compression, {-4}, zeros(8)).has_error());
    CHECK(decode(DType::FLOAT32, compression, {1LL << 62, 4}, zeros(8)).has_error());
    CHECK(decode(DType::FLOAT32, compression, {1LL << 62}, zeros(8)).has_error());
    CHECK(decode(DType::FLOAT32, compression, {1LL << 40}, zeros(8)).has_error());
    CHECK(decode(DType::FLOAT32, compression, {(1LL << 62) + 3, 1}, zeros(8)).has_error());
  }
  // Types that are never compressed, and a format that is not known.
  CHECK(decode(DType::INT32, kHalf, {4}, zeros(8)).has_error());
  CHECK(decode(DType::BFLOAT16, kHalf, {4}, zeros(8)).has_error());
  const auto newer = decode(DType::FLOAT32, 17, {4}, zeros(16));
  REQUIRE(newer.has_error());
  CHECK(test::contains(newer.error().message, "newer"));
  // Scales that are no numbers.
  for (const float scale : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
    std::string bytes = zeros(4 + 4);
    std::memcpy(bytes.data(), &scale, sizeof(scale));
    CHECK(decode(DType::FLOAT32, kInt8, {4}, bytes).has_error());
  }
  // A NaN of float16 stays one: who uses it checks.
  const auto nan = decode(DType::FLOAT32, kHalf, {1}, std::string("\x01\x7E", 2));
  REQUIRE(nan.has_value());
  CHECK(torch::isnan(*nan).all().item<bool>());
  const auto infinite = decode(DType::FLOAT32, kHalf, {1}, std::string("\x00\xFC", 2));
  REQUIRE(infinite.has_value());
  CHECK(infinite->item<float>() == -kInfinity);
}

TEST_CASE("f6 random bytes of every compression and shape are refused or decoded without a throw",
          "[compression][f6]") {
  std::mt19937_64 random(test::seed());
  std::size_t decoded = 0;
  for (int round = 0; round < 3'000; ++round) {
    std::string bytes(random() % 700, '\0');
    for (auto& byte : bytes) byte = static_cast<char>(random());
    std::vector<std::int64_t> shape(random() % 4);
    for (auto& size : shape) size = static_cast<std::int64_t>(random() % 40) - 1;
    if (round % 3 == 0) shape = {static_cast<std::int64_t>(bytes.size() / 2)};
    const auto tensor = decode(net::schema::DType::FLOAT32, static_cast<std::uint16_t>(random() % 5), shape, bytes);
    if (tensor.has_error()) continue;
    ++decoded;
    CHECK(tensor->nbytes() <= 4 * bytes.size());
  }
  CHECK(decoded > 0);
}
