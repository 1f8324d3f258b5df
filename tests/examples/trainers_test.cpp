// The trainers in examples/, as a user would run them: against servers that are processes of their own.
#include "tests/e2e/program_run.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/text.hpp"

#include <regex>
#include <string>
#include <vector>

using dmoe::test::contains;
using dmoe::test::Finished;
using dmoe::test::RunningNode;
using dmoe::test::test_directory;

namespace {

/// Programs that share this machine's cores: one thread each.
Finished run(const char* program, const std::vector<std::string>& arguments) {
  return dmoe::test::run_program(program, arguments, {"OMP_NUM_THREADS=1", "OPENBLAS_NUM_THREADS=1"});
}

std::vector<std::string> server(const std::string& pattern, int width, const std::string& seed,
                                const std::vector<std::string>& more) {
  std::vector<std::string> arguments{"serve",  pattern, "--hidden-dim", std::to_string(width),
                                     "--seed", seed,    "--threads",    "1"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

/// Every number that follows `word` in `text`.
std::vector<double> numbers_after(const std::string& text, const std::string& word) {
  std::vector<double> numbers;
  const std::regex wanted(word + "\\s+([0-9.]+)");
  for (auto it = std::sregex_iterator(text.begin(), text.end(), wanted); it != std::sregex_iterator(); ++it) {
    numbers.push_back(std::stod((*it)[1]));
  }
  return numbers;
}

}  // namespace

TEST_CASE("mnist_dmoe learns clothes from experts on two servers", "[examples]") {
  const auto directory = test_directory();
  const RunningNode first(directory.path(), "first", server("ffn.[0:2].[0:4]", 64, "1", {}));
  const RunningNode second(directory.path(), "second",
                           server("ffn.[2:4].[0:4]", 64, "2", {"--initial-peers", first.address()}));
  const auto result = run(MNIST_DMOE, {second.address(), "150"});
  INFO(result.out << result.err);
  REQUIRE(result.status.code == 0);
  const auto losses = numbers_after(result.out, "loss");
  REQUIRE(losses.size() == 2);
  CHECK(losses.back() < 1.2);  // ln 10 = 2.3 is chance.
  const auto accuracy = numbers_after(result.out, "accuracy");
  REQUIRE(accuracy.size() == 1);
  CHECK(accuracy.front() > 60);
}

TEST_CASE("text_transformer learns to spell from transformer experts", "[examples]") {
  const auto directory = test_directory();
  const std::vector<std::string> transformer{"--expert", "transformer"};
  const RunningNode low(directory.path(), "low", server("low.[0:4]", 64, "1", transformer));
  const RunningNode high(directory.path(), "high",
                         server("high.[0:4]", 64, "2", {"--expert", "transformer", "--initial-peers", low.address()}));
  const auto result = run(TEXT_TRANSFORMER, {high.address(), README_FILE, "100"});
  INFO(result.out << result.err);
  REQUIRE(result.status.code == 0);
  const auto losses = numbers_after(result.out, "loss");
  REQUIRE(losses.size() == 2);
  CHECK(losses.back() < 3.0);  // ln 90 = 4.5 is chance; letters by their frequency alone come to about 3.3.
  CHECK(losses.back() < losses.front());
  CHECK(contains(result.out, "it writes: "));
}

TEST_CASE("remote_sequential trains a pipeline whose stages are on three servers", "[examples]") {
  const auto directory = test_directory();
  const RunningNode first(directory.path(), "first", server("stage.0", 32, "1", {}));
  const std::vector<std::string> join{"--initial-peers", first.address()};
  const RunningNode second(directory.path(), "second", server("stage.1", 32, "2", join));
  const RunningNode third(directory.path(), "third", server("stage.2", 32, "3", join));
  const auto result = run(REMOTE_SEQUENTIAL, {first.address(), "stage.0", "stage.1", "stage.2", "300"});
  INFO(result.out << result.err);
  REQUIRE(result.status.code == 0);
  CHECK(contains(result.out, "stage.2: ffn, 0 updates so far"));
  const auto accuracy = numbers_after(result.out, "accuracy");
  REQUIRE(accuracy.size() == 1);
  CHECK(accuracy.front() > 80);  // Half is chance; a line comes to about 60.
  const auto again = run(REMOTE_SEQUENTIAL, {first.address(), "stage.0", "stage.1", "stage.2", "1"});
  CHECK(contains(again.out, "stage.2: ffn, 300 updates so far"));
}

TEST_CASE("a trainer in examples says what is wrong", "[examples]") {
  for (const char* program : {MNIST_DMOE, TEXT_TRANSFORMER, REMOTE_SEQUENTIAL}) {
    const auto nothing = run(program, {});
    INFO(program << ": " << nothing.err);
    CHECK(nothing.status.code == 1);
    CHECK(contains(nothing.err, "usage: "));
  }
  const auto directory = test_directory();
  const RunningNode other(directory.path(), "other", server("other.0", 8, "1", {}));
  const auto lost = run(REMOTE_SEQUENTIAL, {other.address(), "stage.0"});
  INFO(lost.err);
  CHECK(lost.status.code == 1);
  CHECK(contains(lost.err, "stage.0"));
  CHECK(contains(lost.err, "nobody hosts it"));
  const auto unlike = run(REMOTE_SEQUENTIAL, {other.address(), "other.0"});
  INFO(unlike.err);
  CHECK(unlike.status.code == 1);
  CHECK(contains(unlike.err, "[rows, 8]"));
}
