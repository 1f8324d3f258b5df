// The data set loader: files that belong together, and those that do not.
#include "cli/image_dataset.hpp"
#include "tests/e2e/program_run.hpp"
#include "tests/support/catch.hpp"

#include <torch/types.h>

using namespace dmoe;
using dmoe::test::test_directory;
using dmoe::test::write_text;

namespace {

std::string idx(const std::vector<std::uint8_t>& shape, const std::string& data) {
  std::string bytes{'\0', '\0', '\x08', static_cast<char>(shape.size())};
  for (const std::uint8_t size : shape) bytes += std::string(3, '\0') + static_cast<char>(size);
  return bytes + data;
}

/// Three 1 × 2 training images and one test image.
void write_small_set(const std::filesystem::path& directory) {
  write_text(directory / "train-images-idx3-ubyte", idx({3, 1, 2}, std::string("\x00\xff\x00\xff\x00\xff", 6)));
  write_text(directory / "train-labels-idx1-ubyte", idx({3}, std::string("\x00\x01\x02", 3)));
  write_text(directory / "t10k-images-idx3-ubyte", idx({1, 1, 2}, std::string("\x00\xff", 2)));
  write_text(directory / "t10k-labels-idx1-ubyte", idx({1}, std::string("\x04", 1)));
}

}  // namespace

TEST_CASE("A data set of four plain files is read and scaled", "[data]") {
  const auto directory = test_directory();
  write_small_set(directory.path());
  const auto data = cli::load_images(directory.path());
  REQUIRE(data.has_value());
  CHECK(data->train.size() == 3);
  CHECK(data->test.size() == 1);
  CHECK(data->features() == 2);
  CHECK(data->classes == 5);
  const cli::Batch batch = cli::batch_of(data->train, torch::tensor({2, 0}, torch::kInt64));
  CHECK(torch::allclose(batch.inputs, torch::tensor({{-1.0F, 1.0F}, {-1.0F, 1.0F}})));
  CHECK(torch::equal(batch.labels, torch::tensor({2, 0}, torch::kInt64)));
}

TEST_CASE("A missing data set names the Debian package and the option", "[data]") {
  const auto directory = test_directory();
  const auto data = cli::load_images(directory.path());
  REQUIRE_FALSE(data.has_value());
  CHECK(data.error().code == Errc::kNotFound);
  CHECK(data.error().message.find("dataset-fashion-mnist") != std::string::npos);
  CHECK(data.error().message.find("--data") != std::string::npos);
}

TEST_CASE("Images and labels that do not belong together are refused", "[data]") {
  const auto directory = test_directory();
  write_small_set(directory.path());
  SECTION("fewer labels") { write_text(directory.path() / "train-labels-idx1-ubyte", idx({2}, "ab")); }
  SECTION("labels with two dimensions") {
    write_text(directory.path() / "train-labels-idx1-ubyte", idx({3, 1}, "abc"));
  }
  SECTION("test images of another size") {
    write_text(directory.path() / "t10k-images-idx3-ubyte", idx({1, 1, 1}, "a"));
  }
  const auto data = cli::load_images(directory.path());
  REQUIRE_FALSE(data.has_value());
  CHECK(data.error().code == Errc::kInvalidArgument);
}

TEST_CASE("The sampler shows every row once per pass in an order set by its seed", "[data]") {
  cli::LabelledImages images{torch::zeros({7, 1}, torch::kUInt8), torch::arange(7, torch::kInt64)};
  const auto one_pass = [&](std::uint64_t seed) {
    cli::BatchSampler sampler(images, 3, seed);
    return torch::cat({sampler.next().labels, sampler.next().labels});
  };
  CHECK(torch::equal(one_pass(1), one_pass(1)));
  CHECK_FALSE(torch::equal(one_pass(1), one_pass(2)));
  CHECK(std::get<0>(torch::_unique(one_pass(1))).numel() == 6);
  cli::BatchSampler small(images, 100, 1);
  CHECK(small.next().labels.numel() == 7);
}
