// Models in files: all of it or what was there before, and nothing that does not fit.
#include "cli/model_file.hpp"
#include "tests/e2e/program_run.hpp"
#include "tests/support/catch.hpp"

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <sys/stat.h>

using namespace dmoe;
using dmoe::test::test_directory;

namespace {

torch::nn::Sequential model(std::int64_t width) {
  return torch::nn::Sequential(torch::nn::Linear(3, width), torch::nn::Linear(width, 2));
}

bool same(torch::nn::Sequential& a, torch::nn::Sequential& b) {
  const torch::Tensor input = torch::ones({1, 3});
  return torch::equal(a->forward(input), b->forward(input));
}

std::size_t files_in(const std::filesystem::path& directory) {
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) count += entry.is_regular_file() ? 1 : 0;
  return count;
}

bool says(const Error& error, const std::string& part) { return error.message.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("A saved model is loaded with the same bits", "[model-file]") {
  const auto directory = test_directory();
  const auto file = directory.path() / "model.pt";
  auto first = model(4);
  REQUIRE(cli::save_model(*first, file).has_value());
  auto second = model(4);
  CHECK_FALSE(same(first, second));
  REQUIRE(cli::load_model(*second, file).has_value());
  CHECK(same(first, second));
  // Saved again, it replaces the file and leaves nothing beside it.
  auto third = model(4);
  REQUIRE(cli::save_model(*third, file).has_value());
  REQUIRE(cli::load_model(*second, file).has_value());
  CHECK(same(third, second));
  CHECK(files_in(directory.path()) == 1);
}

TEST_CASE("A model of another shape is refused by the name of the tensor", "[model-file]") {
  const auto directory = test_directory();
  const auto file = directory.path() / "model.pt";
  REQUIRE(cli::save_model(*model(4), file).has_value());
  auto wider = model(5);
  const auto loaded = cli::load_model(*wider, file);
  REQUIRE_FALSE(loaded.has_value());
  CHECK(loaded.error().code == Errc::kInvalidArgument);
  for (const char* part : {"0.bias is [4] there and [5] here", "--hidden-dim"}) CHECK(says(loaded.error(), part));
  auto longer = model(4);
  longer->push_back(torch::nn::Linear(2, 2));
  CHECK_FALSE(cli::load_model(*longer, file).has_value());
}

TEST_CASE("A damaged model is refused and a missing one named", "[model-file]") {
  const auto directory = test_directory();
  const auto file = directory.path() / "model.pt";
  auto into = model(4);
  const auto missing = cli::load_model(*into, file);
  REQUIRE_FALSE(missing.has_value());
  CHECK(missing.error().code == Errc::kNotFound);
  CHECK(says(missing.error(), file.string()));
  REQUIRE(cli::save_model(*model(4), file).has_value());
  const std::string bytes = test::read_text(file);
  for (const std::string& damaged : {std::string("garbage"), std::string(), bytes.substr(0, bytes.size() / 2)}) {
    test::write_text(file, damaged);
    const auto loaded = cli::load_model(*into, file);
    REQUIRE_FALSE(loaded.has_value());
    CHECK(loaded.error().code == Errc::kInvalidArgument);
    CHECK(says(loaded.error(), "damaged"));
  }
}

TEST_CASE("A place that cannot be written is refused before and after", "[model-file]") {
  const auto directory = test_directory();
  for (const auto& file : {directory.path() / "missing" / "model.pt", directory.path()}) {
    for (const auto& outcome : {cli::check_can_save(file), cli::save_model(*model(4), file)}) {
      REQUIRE_FALSE(outcome.has_value());
      CHECK(outcome.error().code == Errc::kUnavailable);
      CHECK(says(outcome.error(), "--save '" + file.string() + "'"));
    }
  }
  CHECK(cli::check_can_save(directory.path() / "model.pt").has_value());
  CHECK(files_in(directory.path()) == 0);
}
