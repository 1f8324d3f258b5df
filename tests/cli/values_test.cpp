// Values of options, and what is made of them: durations, sizes, records as text.
#include "cli/options.hpp"
#include "cli/record_text.hpp"
#include "cli/size_estimate.hpp"
#include "tests/e2e/program_run.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/text.hpp"

using namespace dmoe;
using namespace std::chrono_literals;
using dmoe::test::test_directory;

namespace {

using test::contains;

constexpr double kGiB = 1024.0 * 1024 * 1024;

}  // namespace

TEST_CASE("Durations are read with their units", "[values]") {
  CHECK(*cli::parse_duration("90s") == 90s);
  CHECK(*cli::parse_duration("15m") == 15min);
  CHECK(*cli::parse_duration("1.5h") == 90min);
  CHECK(*cli::parse_duration("1d") == 24h);
  CHECK(*cli::parse_duration("45") == 45s);
  CHECK(*cli::parse_duration("0.25") == 250ms);
  for (const char* text : {"", "h", "-1h", "1w", "1h30m", "nan", "inf", "1e300h", "1 h", "0x10"}) {
    INFO(text);
    const auto duration = cli::parse_duration(text);
    REQUIRE_FALSE(duration.has_value());
    CHECK(contains(duration.error().message, "for example"));
  }
}

TEST_CASE("Durations are written in their two largest units", "[values]") {
  CHECK(cli::duration_text(0ms) == "0s");
  CHECK(cli::duration_text(1h) == "1h");
  CHECK(cli::duration_text(59min + 58s) == "59m 58s");
  CHECK(cli::duration_text(25h + 3s) == "1d 1h");
  CHECK(cli::duration_text(1'499ms) == "1s");
}

TEST_CASE("g15 Sizes are estimated without being allocated", "[values]") {
  expert_server::ExpertOptions options;
  options.hidden_dim = 1'024;
  // 24 h² floats of weights and three copies of each for Adam with AMSGrad.
  const double sixteen = cli::size_of_experts(options, 16).weights / kGiB;
  CHECK(sixteen > 16 * 4 * 24 * 4 / 1'024.0 * 0.99);
  CHECK(sixteen < 16 * 4 * 24 * 4 / 1'024.0 * 1.05);
  options.frozen = true;
  CHECK(cli::size_of_experts(options, 16).weights / kGiB < sixteen / 3.9);
  options.frozen = false;
  options.optimizer = "sgd";
  CHECK(cli::size_of_experts(options, 16).weights / kGiB < sixteen / 3.9);
  options.momentum = 0.9;
  CHECK(cli::size_of_experts(options, 16).weights / kGiB < sixteen / 1.9);
  options.architecture = "nop";
  options.hidden_dim = 1'000'000;
  options.max_batch_size = std::int64_t{1} << 40;
  CHECK(cli::size_of_experts(options, 1e9).total() > 1e18);
  CHECK(cli::size_of_trainer(784, 1e6, {1'000, 1'000}, 128, 4).total() > 1e10);
}

TEST_CASE("g15 What does not fit is refused with its size and that of the memory", "[values]") {
  const cli::SizeEstimate estimate{3 * kGiB, 1.5 * kGiB};
  CHECK(cli::check_fits("16 experts", estimate, 5 * kGiB, "lower it").has_value());
  CHECK(cli::check_fits("16 experts", estimate, std::nullopt, "lower it").has_value());
  const auto refused = cli::check_fits("16 experts", estimate, 4 * kGiB, "lower it");
  REQUIRE_FALSE(refused.has_value());
  for (const char* part : {"16 experts", "4.5 GiB", "3.0 GiB", "1.5 GiB", "4.0 GiB", "lower it"}) {
    INFO(part);
    CHECK(contains(refused.error().message, part));
  }
}

TEST_CASE("g15 The limit of memory is the least of the machine and its control group", "[values]") {
  const auto directory = test_directory();
  const auto root = directory.path();
  CHECK_FALSE(cli::memory_limit(root).has_value());
  std::filesystem::create_directories(root / "proc");
  std::filesystem::create_directories(root / "sys/fs/cgroup");
  test::write_text(root / "proc/meminfo", "MemTotal:       8388608 kB\nMemFree:        100 kB\n");
  CHECK(*cli::memory_limit(root) == 8 * kGiB);
  test::write_text(root / "sys/fs/cgroup/memory.max", "max\n");
  CHECK(*cli::memory_limit(root) == 8 * kGiB);
  test::write_text(root / "sys/fs/cgroup/memory.max", "1073741824\n");
  CHECK(*cli::memory_limit(root) == kGiB);
}

TEST_CASE("Records are listed newest first and harmless to a terminal", "[values]") {
  const auto now = std::chrono::steady_clock::now();
  dht::Record older;
  older.sequence = 1;
  older.subkey = "a";
  older.value = {'o', 'l', 'd', '\n', 0x1b, '['};
  dht::Record newer = older;
  newer.sequence = 2;
  newer.subkey = "";
  newer.value = {0xff, 0x00, 'x'};
  const auto records = cli::describe_records({{older, now + 90s}, {newer, now + 1h}}, now);
  REQUIRE(records.size() == 2);
  CHECK(records[0].sequence == 2);
  CHECK(cli::to_line(records[0]) == "-  " + records[0].publisher + "  1h  3 bytes  \\xff\\x00x");
  CHECK(cli::to_line(records[1]) == "a  " + records[1].publisher + "  1m 30s  6 bytes  old\\x0a\\x1b[");
  const auto json = cli::to_json("k", records);
  CHECK(json["records"][0]["value_base64"] == "/wB4");
  CHECK(json["records"][1]["value"] == "old\n\x1b[");
  CHECK(json["records"][1]["remaining_seconds"] == 90);
}

TEST_CASE("base64 is padded to groups of four", "[values]") {
  const auto encoded = [](std::vector<std::uint8_t> value) {
    value.insert(value.begin(), 0xff);
    const auto json = cli::to_json("k", {{"", "p", 1, 1s, value}});
    return json["records"][0]["value_base64"].get<std::string>();
  };
  CHECK(encoded({}) == "/w==");
  CHECK(encoded({0xff}) == "//8=");
  CHECK(encoded({0xff, 0xff}) == "////");
  CHECK(encoded({0xff, 0xff, 0x00}) == "////AA==");
}
