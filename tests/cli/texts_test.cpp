// What the program prints, as text: ready lines, start-up report, progress, tables, warnings.
#include "cli/announced_address.hpp"
#include "cli/demo_report.hpp"
#include "cli/matrix_speed.hpp"
#include "cli/progress.hpp"
#include "cli/ready_line.hpp"
#include "cli/startup_report.hpp"
#include "tests/e2e/program_run.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/text.hpp"

#include <nlohmann/json.hpp>

using namespace dmoe;
using dmoe::test::test_directory;

namespace {

cli::ReadyLine example_line() {
  return {"ab12", "/data/identity.pem", {"0.0.0.0", 4040}, {{"203.0.113.5", 4040}}, {"ffn.0.0", "ffn.0.1", "ffn.0.2"}};
}

using test::contains;

/// What `draw` prints to a stream.
std::string printed(const std::function<void(std::FILE*)>& draw) {
  const auto directory = test_directory();
  const auto file = directory.path() / "out";
  std::FILE* stream = std::fopen(file.c_str(), "w");
  REQUIRE(stream != nullptr);
  draw(stream);
  std::fclose(stream);
  return test::read_text(file);
}

}  // namespace

TEST_CASE("A ready line is read back as it was written", "[texts]") {
  const cli::ReadyLine line = example_line();
  const auto read = cli::parse_ready_line(cli::to_json(line));
  REQUIRE(read.has_value());
  CHECK(read->peer_id == line.peer_id);
  CHECK(read->identity == line.identity);
  CHECK(read->listen == line.listen);
  CHECK(read->announced == line.announced);
  CHECK(read->experts == line.experts);
}

TEST_CASE("A text that is no ready line is refused", "[texts]") {
  for (const char* text :
       {"", "ready", "{}", "[1]", "null", R"({"peer_id":1,"identity":"","listen":"a:1","announced":[],"experts":[]})",
        R"({"peer_id":"x","identity":"","listen":"nowhere","announced":[],"experts":[]})"}) {
    INFO(text);
    CHECK_FALSE(cli::parse_ready_line(text).has_value());
  }
}

TEST_CASE("The start-up report gives the line to run on another machine", "[texts]") {
  const std::string text = cli::startup_report(example_line(), "dmoe serve");
  CHECK(contains(text, "/data/identity.pem"));
  CHECK(contains(text, "ab12"));
  CHECK(contains(text, "3: ffn.0.0 ... ffn.0.2"));
  CHECK(contains(text, "dmoe serve --initial-peers 203.0.113.5:4040"));
  CHECK_FALSE(contains(text, "loopback"));
}

TEST_CASE("The start-up report explains that a loopback address is for this machine only", "[texts]") {
  cli::ReadyLine line = example_line();
  line.announced = {{"127.0.0.1", 4040}};
  const std::string text = cli::startup_report(line, "dmoe serve");
  CHECK(contains(text, "Other machines cannot reach this loopback address"));
  CHECK(contains(text, "--listen 0.0.0.0:4040 --announce"));
}

TEST_CASE("e10 The pattern to join with is beside the one that is hosted", "[texts][e10]") {
  CHECK(cli::pattern_beside("ffn.[0:2].[0:4]") == "ffn.[2:4].[0:4]");
  CHECK(cli::pattern_beside("ffn.3.[0:8]") == "ffn.4.[0:8]");
  CHECK(cli::pattern_beside("stage.0") == "stage.1");
  CHECK(cli::pattern_beside("no pattern") == "no pattern");
}

TEST_CASE("A word is quoted for the shell only where it must be", "[texts]") {
  CHECK(cli::shell_word("ffn.0.1") == "ffn.0.1");
  CHECK(cli::shell_word("ffn.[0:4]") == "'ffn.[0:4]'");
  CHECK(cli::shell_word("it's") == "'it'\\''s'");
  CHECK(cli::shell_word("") == "''");
}

TEST_CASE("b17 A wildcard address is never announced", "[texts]") {
  const net::Endpoint any{"0.0.0.0", 4040};
  const auto guessed = cli::addresses_to_announce(any, {});
  REQUIRE_FALSE(guessed.has_value());
  CHECK(contains(guessed.error().message, "--announce"));
  CHECK_FALSE(cli::addresses_to_announce(any, {{"::", 4040}}).has_value());
  const auto given = cli::addresses_to_announce(any, {{"203.0.113.5", 4040}});
  REQUIRE(given.has_value());
  CHECK(*given == std::vector<net::Endpoint>{{"203.0.113.5", 4040}});
  const auto loopback = cli::addresses_to_announce({"127.0.0.1", 0}, {});
  REQUIRE(loopback.has_value());
  CHECK(*loopback == std::vector<net::Endpoint>{{"127.0.0.1", 0}});
}

TEST_CASE("b17 A loopback address announced to a network elsewhere is warned of", "[texts]") {
  const std::vector<net::Endpoint> loopback{{"127.0.1.1", 1}};
  CHECK(contains(cli::reachability_warning(loopback, {{"203.0.113.5", 4040}}), "other machines cannot reach it"));
  CHECK(cli::reachability_warning(loopback, {{"localhost", 4040}, {"::1", 4040}}).empty());
  CHECK(cli::reachability_warning({{"203.0.113.6", 1}}, {{"203.0.113.5", 4040}}).empty());
  CHECK(cli::reachability_warning(loopback, {}).empty());
}

TEST_CASE("Progress is plain lines where there is no terminal", "[texts]") {
  const std::string text = printed([](std::FILE* stream) {
    cli::Progress progress(stream, 100, false);
    for (int i = 1; i <= 100; ++i) {
      progress.show(i, "loss");
      if (i == 50) progress.say("half way");
    }
  });
  CHECK(text ==
        "1/100 loss\n10/100 loss\n20/100 loss\n30/100 loss\n40/100 loss\n50/100 loss\nhalf way\n60/100 loss\n"
        "70/100 loss\n80/100 loss\n90/100 loss\n100/100 loss\n");
}

TEST_CASE("Progress is a bar that redraws itself on a terminal", "[texts]") {
  const std::string text = printed([](std::FILE* stream) {
    cli::Progress progress(stream, 10, true);
    progress.show(1, "a");
    progress.say("note");
    progress.show(10, "z");
  });
  CHECK(contains(text, "\r[###...........................] 1/10 a\033[K"));
  CHECK(contains(text, "\r\033[Knote\n[###"));
  CHECK(contains(text, "\r[##############################] 10/10 z\033[K\n"));
}

TEST_CASE("The demo's report measures what the kill cost", "[texts]") {
  cli::DemoReport report;
  std::vector<double> step_ms(100, 10.0);
  step_ms[50] = 900;
  step_ms[51] = 40;
  step_ms.insert(step_ms.end(), 500, 10.0);
  cli::describe_kill(step_ms, 50, report);
  CHECK(report.usual_step_ms == 10);
  CHECK(report.max_step_ms_after_kill == 900);
  CHECK(report.lost_to_kill_ms == 920);
  CHECK(report.recovered_step_ms == 10);
  cli::DemoReport nothing_killed;
  cli::describe_kill(step_ms, -1, nothing_killed);
  CHECK(nothing_killed.max_step_ms_after_kill == 0);
}

TEST_CASE("The demo's object has the promised fields", "[texts]") {
  const auto json = nlohmann::json::parse(cli::to_json(cli::DemoReport{}));
  for (const char* field : {"test_accuracy", "steps", "seconds", "experts_start", "experts_end", "servers_killed",
                            "failed_calls", "max_step_ms_after_kill"}) {
    INFO(field);
    CHECK(json.contains(field));
  }
}

TEST_CASE("Slow matrix products name the package to install", "[texts]") {
  CHECK(contains(cli::slow_matrix_warning(1.2), "libopenblas0-pthread"));
  CHECK(cli::slow_matrix_warning(50).empty());
  CHECK(cli::measure_gigaflops() > 0);
}
