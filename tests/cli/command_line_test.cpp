// The program as its users meet it: exit statuses and the one line that says what is wrong.
#include "tests/e2e/program_run.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/text.hpp"

#include <algorithm>
#include <filesystem>

#include <sys/stat.h>

using namespace dmoe;
using dmoe::test::Finished;
using dmoe::test::run_dmoe;
using dmoe::test::test_directory;

namespace {

using test::contains;

std::ptrdiff_t lines(const std::string& text) { return std::count(text.begin(), text.end(), '\n'); }

struct WrongUse {
  std::vector<std::string> arguments;
  std::vector<std::string> parts;  ///< Of the message: the flag, the value, the fix.
};

}  // namespace

TEST_CASE("Wrong use exits with status 2 and one line that names flag and value and fix", "[program]") {
  const std::vector<WrongUse> cases{
      {{}, {"no command was given", "dmoe --help"}},
      {{"frobnicate"}, {"frobnicate", "dmoe --help"}},
      {{"demo", "--stepz", "5"}, {"dmoe demo", "--stepz", "dmoe demo --help"}},
      {{"demo", "--steps", "many"}, {"--steps", "'many'", "for example 1500"}},
      {{"demo", "--steps", "0"}, {"--steps", "'0'", "from 1 to"}},
      {{"demo", "--steps", "1.5"}, {"--steps", "'1.5'", "whole number"}},
      {{"demo", "--steps"}, {"--steps"}},
      {{"demo", "--experts", "10", "--servers", "4"}, {"--experts 10", "--servers 4", "multiple"}},
      {{"demo", "--learning-rate", "nan"}, {"--learning-rate", "'nan'", "for example 0.001"}},
      {{"train"}, {"--initial-peers", "required"}},
      {{"train", "--initial-peers", "nowhere"}, {"--initial-peers", "nowhere"}},
      {{"train", "--initial-peers", "127.0.0.1:70000"}, {"--initial-peers", "127.0.0.1:70000"}},
      {{"train", "--initial-peers", "127.0.0.1:1", "--grid", "4x4"}, {"--grid", "'4x4'", "for example ffn"}},
      {{"train", "--initial-peers", "127.0.0.1:1", "--k-min", "5"}, {"--k-min 5", "--k-best 4"}},
      {{"experts", "ffn.", "--initial-peers", ""}, {"--initial-peers"}},
      {{"experts", "ffn.3", "--initial-peers", "127.0.0.1:1"}, {"ffn.3"}},
      {{"experts", "ffn.1.2.", "--initial-peers", "127.0.0.1:1"}, {"--dimensions 2", "ffn.1.2."}},
      {{"serve", "ffn.[4:0]"}, {"pattern", "ffn.[4:0]"}},
      {{"serve", "ffn.[0:"}, {"pattern", "ffn.[0:"}},
      {{"serve", "--expert", "cnn"}, {"--expert", "cnn", "ffn"}},
      {{"serve", "--hidden-dim", "-3"}, {"--hidden-dim", "'-3'", "for example"}},
      {{"serve", "--optimizer", "lion"}, {"--optimizer", "lion", "adam"}},
      {{"serve", "--amsgrad", "perhaps"}, {"--amsgrad", "'perhaps'", "true"}},
      {{"serve", "--expert-arg", "num_heads"}, {"--expert-arg", "num_heads", "NAME=VALUE"}},
      {{"serve", "--listen", "0.0.0.0:0"}, {"--listen 0.0.0.0:0", "--announce"}},
      {{"serve", "--announce", "0.0.0.0:4040"}, {"--announce 0.0.0.0:4040"}},
      {{"serve", "--listen", "4040"}, {"--listen", "4040"}},
      {{"serve", "--heartbeat", "60", "--announcement-ttl", "60"}, {"--announcement-ttl", "--heartbeat"}},
      {{"serve", "--log-level", "loud"}, {"--log-level", "loud"}},
      {{"dht", "--listen", "::"}, {"--listen", "::"}},
      {{"dht", "walk"}, {"walk"}},
      {{"dht", "put"}, {"dmoe dht put", "--key is required"}},
      {{"dht", "put", "k"}, {"VALUE", "--file"}},
      {{"dht", "put", "k", "v", "--file", "f", "--initial-peers", "127.0.0.1:1"}, {"VALUE", "--file"}},
      {{"dht", "put", "k", "v"}, {"--initial-peers", "127.0.0.1:4040"}},
      {{"dht", "put", "k", "v", "--ttl", "soon", "--initial-peers", "127.0.0.1:1"}, {"--ttl", "'soon'", "1h"}},
      {{"dht", "put", "k", "v", "--ttl", "2d", "--initial-peers", "127.0.0.1:1"}, {"--ttl", "'2d'", "1d"}},
      {{"dht", "put", "k", "v", "--subkey", std::string(65, 's'), "--initial-peers", "127.0.0.1:1"},
       {"--subkey", "65 bytes", "64"}},
      {{"dht", "put", "k", "v", "w"}, {"w"}},
      {{"dht", "get"}, {"dmoe dht get", "--key is required"}},
      {{"dht", "get", "k"}, {"--initial-peers", "127.0.0.1:4040"}},
      {{"dht", "get", "k", "--publisher", "me", "--initial-peers", "127.0.0.1:1"}, {"--publisher", "'me'"}},
      {{"dht", "ping"}, {"dmoe dht ping", "--node is required"}},
      {{"dht", "ping", "nowhere"}, {"nowhere"}},
      {{"dht", "stats", "127.0.0.1:99999"}, {"127.0.0.1:99999"}},
      {{"serve", "ffn.[0:100].[0:100]"}, {"10000 experts", "--num-experts"}},
      {{"serve", "--num-experts", "1000000000"}, {"--num-experts 1000000000", "16 experts", "pattern"}},
      {{"serve", "--hidden-dim", "1000000"}, {"16 experts", "--hidden-dim 1000000", "PiB", "lower"}},
      {{"serve", "--max-batch-size", "1099511627776"}, {"--max-batch-size 1099511627776", "PiB", "lower"}},
      {{"serve", "ffn.[0:100000].[0:100000]", "--num-experts", "1000000000"}, {"1000000000 experts", "PiB"}},
      {{"serve", "--expert", "nop", "--hidden-dim", "70000", "--max-batch-size", "1"}, {"--hidden-dim 70000", "65536"}},
      {{"demo", "--hidden-dim", "8192", "--experts", "4096"}, {"4096 experts", "TiB", "lower"}},
      {{"train", "--initial-peers", "127.0.0.1:1", "--hidden-dim", "1000000000"}, {"--hidden-dim 1000000000", "TiB"}},
      {{"train", "--initial-peers", "127.0.0.1:1", "--batch-size", "1000000000000"}, {"--batch-size", "PiB"}},
      {{"keygen", "a", "b"}, {"b"}},
  };
  for (const WrongUse& entry : cases) {
    std::string line = "dmoe";
    for (const std::string& argument : entry.arguments) line += " " + argument;
    INFO(line);
    const Finished run = run_dmoe(entry.arguments);
    INFO(run.err);
    CHECK(run.status.code == 2);
    CHECK(run.status.signal == 0);
    CHECK(run.out.empty());
    CHECK(lines(run.err) == 1);
    CHECK(run.err.starts_with("dmoe"));
    for (const std::string& part : entry.parts) {
      INFO(part);
      CHECK(contains(run.err, part));
    }
  }
}

TEST_CASE("Every command explains itself with an example", "[program]") {
  const std::vector<std::vector<std::string>> commands{
      {},       {"serve"},  {"dht"},        {"dht", "run"}, {"experts"},     {"train"},
      {"demo"}, {"keygen"}, {"dht", "put"}, {"dht", "get"}, {"dht", "ping"}, {"dht", "stats"}};
  for (std::vector<std::string> arguments : commands) {
    arguments.emplace_back("--help");
    const Finished run = run_dmoe(arguments);
    INFO(run.out);
    CHECK(run.status.code == 0);
    CHECK(contains(run.out, "Example"));
    CHECK(contains(run.out, "dmoe "));
    CHECK(run.err.empty());
  }
  CHECK(contains(run_dmoe({"serve", "--help"}).out, "in seconds"));
}

TEST_CASE("The version is printed", "[program]") {
  const Finished run = run_dmoe({"--version"});
  CHECK(run.status.code == 0);
  CHECK(run.out.starts_with("dmoe 0."));
}

TEST_CASE("keygen makes a private file and never replaces one", "[program]") {
  const auto directory = test_directory();
  const std::string file = (directory.path() / "identity.pem").string();
  const Finished made = run_dmoe({"keygen", file});
  CHECK(made.status.code == 0);
  CHECK(contains(made.out, file));
  struct stat status {};
  REQUIRE(stat(file.c_str(), &status) == 0);
  CHECK((status.st_mode & 0777U) == 0600U);
  const std::string key = test::read_text(file);
  CHECK(contains(key, "PRIVATE KEY"));
  const Finished again = run_dmoe({"keygen", "--file", file});
  CHECK(again.status.code == 1);
  CHECK(contains(again.err, file));
  CHECK(lines(again.err) == 1);
  CHECK(test::read_text(file) == key);
}

TEST_CASE("A missing data set is a failed run that names the package and the option", "[program]") {
  const auto directory = test_directory();
  for (const char* command : {"demo", "train"}) {
    std::vector<std::string> arguments{command, "--data", directory.path().string()};
    if (std::string(command) == "train") arguments.insert(arguments.end(), {"--initial-peers", "127.0.0.1:1"});
    const Finished run = run_dmoe(arguments);
    INFO(run.err);
    CHECK(run.status.code == 1);
    CHECK(lines(run.err) == 1);
    CHECK(contains(run.err, "dataset-fashion-mnist"));
    CHECK(contains(run.err, "--data"));
  }
}

TEST_CASE("A damaged data set is a failed run that names the file", "[program]") {
  const auto directory = test_directory();
  test::write_text(directory.path() / "train-images-idx3-ubyte", "garbage");
  const Finished run = run_dmoe({"demo", "--data", directory.path().string()});
  CHECK(run.status.code == 1);
  CHECK(contains(run.err, "train-images-idx3-ubyte"));
}

TEST_CASE("A home directory is needed only when no data directory is named", "[program]") {
  const Finished run = run_dmoe({"serve"}, {"HOME=", "XDG_DATA_HOME="});
  CHECK(run.status.code == 2);
  CHECK(contains(run.err, "--data-dir"));
}
