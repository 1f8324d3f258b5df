// Options from a TOML file: every key of every command, and nothing that is not one.
#include "tests/e2e/program_run.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/text.hpp"

using namespace dmoe;
using dmoe::test::Finished;
using dmoe::test::run_dmoe;
using dmoe::test::test_directory;

namespace {

using test::contains;

/// Runs the program with a configuration file of this content.
Finished with_config(const std::string& toml, std::vector<std::string> arguments) {
  const auto directory = test_directory();
  const auto file = directory.path() / "dmoe.toml";
  test::write_text(file, toml);
  arguments.insert(arguments.begin(), {"--config", file.string()});
  return run_dmoe(arguments);
}

}  // namespace

TEST_CASE("A key file named in the configuration is used", "[config]") {
  const auto directory = test_directory();
  const std::string file = (directory.path() / "from-config.pem").string();
  const Finished run = with_config("log-level = \"warn\"\n[keygen]\nfile = \"" + file + "\"\n", {"keygen"});
  INFO(run.err);
  CHECK(run.status.code == 0);
  CHECK(contains(run.out, file));
}

TEST_CASE("The command line wins over the configuration", "[config]") {
  const auto directory = test_directory();
  const std::string file = (directory.path() / "from-line.pem").string();
  const Finished run = with_config("[keygen]\nfile = \"/nonexistent/key.pem\"\n", {"keygen", "--file", file});
  INFO(run.err);
  CHECK(run.status.code == 0);
  CHECK(contains(run.out, file));
}

TEST_CASE("An unknown key is wrong use that names key and file", "[config]") {
  struct Case {
    const char* toml;
    const char* key;
  };
  for (const Case& entry :
       {Case{"log-levle = \"warn\"\n", "log-levle"}, Case{"[serve]\nhiden-dim = 64\n", "serve.hiden-dim"},
        Case{"[demo]\nsteps = 10\nstep = 10\n", "demo.step"}, Case{"[dht.run]\npeers = \"a:1\"\n", "dht.run.peers"},
        Case{"[sevre]\nhidden-dim = 64\n", "sevre"}}) {
    INFO(entry.toml);
    const Finished run = with_config(entry.toml, {"keygen", "/nonexistent/key.pem"});
    INFO(run.err);
    CHECK(run.status.code == 2);
    CHECK(contains(run.err, std::string("unknown key ")));
    CHECK(contains(run.err, entry.key));
    CHECK(contains(run.err, "dmoe.toml"));
  }
}

TEST_CASE("A bad value in the configuration is wrong use that names the file", "[config]") {
  const Finished run = with_config("[demo]\nsteps = \"many\"\n", {"demo"});
  INFO(run.err);
  CHECK(run.status.code == 2);
  CHECK(contains(run.err, "'many'"));
  CHECK(contains(run.err, "dmoe.toml"));
}

TEST_CASE("A configuration that cannot be read is wrong use", "[config]") {
  const Finished run = run_dmoe({"--config", "/nonexistent/dmoe.toml", "keygen"});
  INFO(run.err);
  CHECK(run.status.code == 2);
  CHECK(contains(run.err, "/nonexistent/dmoe.toml"));
}

TEST_CASE("e9 Lists of addresses may be given in every usual way", "[config]") {
  // Both addresses refuse at once, and the message of the failed run lists exactly these.
  const std::string a = "127.0.0.1:1";
  const std::string b = "127.0.0.1:2";
  const std::vector<std::string> tail{"--dimensions", "2", "--timeout", "1"};
  const auto check = [&](const Finished& run) {
    INFO(run.err);
    CHECK(run.status.code == 1);
    CHECK(contains(run.err, a));
    CHECK(contains(run.err, b));
  };
  const auto with = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.end(), tail.begin(), tail.end());
    return arguments;
  };
  check(run_dmoe(with({"experts", "--initial-peers", a, b})));
  check(run_dmoe(with({"experts", "--initial-peers", a + "," + b})));
  check(run_dmoe(with({"experts", "--initial-peers", a, "--initial-peers", b})));
  check(with_config("[experts]\ninitial-peers = [\"" + a + "\", \"" + b + "\"]\n", with({"experts"})));
  check(with_config("[experts]\ninitial-peers = \"" + a + "," + b + "\"\n", with({"experts"})));
}

TEST_CASE("A UID pattern with brackets is read from the configuration", "[config]") {
  // The pattern is accepted, so the first complaint is about the option after it.
  const Finished run = with_config("[serve]\npattern = \"ffn.[0:4].[0:4]\"\nlisten = \"0.0.0.0:4040\"\n", {"serve"});
  INFO(run.err);
  CHECK(run.status.code == 2);
  CHECK(contains(run.err, "--announce"));
}
