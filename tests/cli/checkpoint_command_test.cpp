// `dmoe checkpoint`: looking at files that a server left behind.
#include "expert_server/checkpoint_store.hpp"
#include "tests/e2e/program_run.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/text.hpp"

#include <nlohmann/json.hpp>

#include <filesystem>

using namespace dmoe;
using dmoe::test::contains;
using dmoe::test::run_dmoe;
using dmoe::test::test_directory;

namespace {

void write_checkpoint(const std::filesystem::path& folder, const std::string& uid) {
  const expert_server::ExpertDescription description{parse_expert_uid(uid).value(), "ffn", 4, {}};
  const auto backend = expert_server::ExpertBackend::create(description, {}, 16, 1);
  expert_server::CheckpointStore store(folder, 3);
  REQUIRE(store.save((*backend)->snapshot()).has_value());
}

}  // namespace

TEST_CASE("checkpoints are shown and verified and exported from the command line", "[program][d3]") {
  const auto directory = test_directory();
  const auto& folder = directory.path();
  write_checkpoint(folder / "checkpoints", "ffn.0");
  write_checkpoint(folder / "checkpoints", "ffn.1");
  const auto path = folder.string();

  const auto shown = run_dmoe({"checkpoint", "show", path});
  CHECK(shown.status.code == 0);
  CHECK(contains(shown.out, "expert ffn.1, ffn, hidden_dim 4, 0 updates"));
  const auto as_json = run_dmoe({"checkpoint", "show", "--json", path + "/checkpoints/ffn.0"});
  CHECK(nlohmann::json::parse(as_json.out).at("uid") == "ffn.0");
  CHECK(run_dmoe({"checkpoint", "verify", path}).status.code == 0);

  const auto weights = path + "/weights.safetensors";
  CHECK(run_dmoe({"checkpoint", "export", path + "/checkpoints/ffn.0", "--to", weights}).status.code == 0);
  CHECK(std::filesystem::exists(weights));
  CHECK(run_dmoe({"checkpoint", "export", path + "/checkpoints/ffn.0", "--to", weights}).status.code == 1);
  const auto several = run_dmoe({"checkpoint", "export", path + "/checkpoints", "--to", path + "/other"});
  CHECK(several.status.code == 2);
  CHECK(contains(several.err, "several experts"));
  CHECK(run_dmoe({"checkpoint", "verify", path + "/nothing"}).status.code == 1);

  const auto damaged = path + "/checkpoints/ffn.1/checkpoint-0000000001.safetensors";
  std::filesystem::resize_file(damaged, std::filesystem::file_size(damaged) - 1);
  const auto verified = run_dmoe({"checkpoint", "verify", path});
  CHECK(verified.status.code == 1);
  CHECK(contains(verified.out, "DAMAGED"));
  CHECK(contains(verified.err, "1 of 2 files"));
}
