// Files for Python's package safetensors, and back. Run by ctest where that package is installed.
#include "expert_server/architectures.hpp"
#include "expert_server/checkpoint_files.hpp"
#include "expert_server/checkpoint_store.hpp"
#include "expert_server/safetensors.hpp"
#include "tests/expert_server/fixtures.hpp"
#include "tests/support/catch.hpp"

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>

using namespace dmoe;
using namespace dmoe::expert_server;
using namespace dmoe::expert_server::test;

namespace fs = std::filesystem;

namespace {

/// Every dtype that numpy has, no dimension, no element, and text that is not plain.
SafetensorsContent every_kind() {
  SafetensorsContent content{{{"name", "value with \"quotes\", \\ and ünïcode"}}, {}};
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kLong, at::kInt, at::kShort, at::kChar, at::kByte}) {
    content.tensors.push_back({std::string("a.") + c10::toString(dtype), torch::arange(15).view({3, 5}).to(dtype)});
    content.tensors.push_back({std::string("no dimension ") + c10::toString(dtype), torch::scalar_tensor(7, dtype)});
  }
  content.tensors.push_back({"bool", torch::tensor({true, false, true})});
  content.tensors.push_back({"empty", torch::zeros({0, 4})});
  return content;
}

/// A trained expert's checkpoint: parameters, what Adam keeps, and its counters.
fs::path trained_checkpoint(const fs::path& folder) {
  const auto expert = builtin("ffn", 8, {});
  for (int i = 0; i < 3; ++i) REQUIRE(expert->backward({torch::randn({4, 8})}, {torch::randn({4, 8})}, 0).has_value());
  REQUIRE(CheckpointStore(folder, 3).save(expert->snapshot()).has_value());
  return find_checkpoints(folder).value().back();
}

}  // namespace

TEST_CASE("python reads safetensors files as they are and what it writes comes back with the same bits",
          "[.python][safetensors]") {
  const char* reader = std::getenv("DMOE_READ_WITH_PYTHON");
  INFO("DMOE_READ_WITH_PYTHON is the command that reads files, as ctest sets it: PYTHON read_with_python.py");
  REQUIRE(reader != nullptr);
  const TemporaryFolder folder;
  const auto any = folder.path() / "any.safetensors";
  REQUIRE(write_safetensors(any, every_kind()).has_value());
  const auto checkpoint = trained_checkpoint(folder.path() / "checkpoints");
  const auto exported = folder.path() / "exported.safetensors";
  REQUIRE(export_checkpoint(checkpoint, exported).has_value());
  const auto copies = folder.path() / "copies";
  fs::create_directory(copies);

  auto command = std::string(reader) + " --copy-to '" + copies.string() + "'";
  for (const auto& file : {any, checkpoint, exported}) command += " '" + file.string() + "'";
  REQUIRE(std::system(command.c_str()) == 0);

  for (const auto& file : {any, checkpoint, exported}) {
    INFO(file);
    auto original = read_safetensors(file).value();
    auto copy = read_safetensors(copies / file.filename(), /*require_checksum=*/false).value();
    original.metadata.erase(kChecksumKey);
    CHECK(copy.metadata == original.metadata);
    for (auto* content : {&original, &copy}) {
      std::sort(content->tensors.begin(), content->tensors.end(),
                [](const auto& left, const auto& right) { return left.name < right.name; });
    }
    CHECK(same_bits(copy.tensors, original.tensors));
  }
}
