// The program in examples/custom_expert, as a user would run it.
#include "expert_server/checkpoint_files.hpp"
#include "tests/expert_server/fixtures.hpp"
#include "tests/expert_server/test_caller.hpp"
#include "tests/support/catch.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdio>
#include <string>
#include <vector>

using namespace dmoe;
using namespace dmoe::expert_server::test;

namespace {

/// A process whose standard input and output are pipes; killed on destruction if it still runs.
class Program {
 public:
  explicit Program(std::vector<std::string> words) {
    std::array<int, 2> in{};
    std::array<int, 2> out{};
    if (::pipe(in.data()) != 0 || ::pipe(out.data()) != 0) throw std::runtime_error("no pipe");
    std::vector<char*> pointers;
    for (auto& word : words) pointers.push_back(word.data());
    pointers.push_back(nullptr);
    child_ = ::fork();
    if (child_ == 0) {
      ::dup2(in[0], STDIN_FILENO);
      ::dup2(out[1], STDOUT_FILENO);
      for (const int end : {in[0], in[1], out[0], out[1]}) ::close(end);
      ::execv(pointers[0], pointers.data());
      ::_exit(127);
    }
    ::close(in[0]);
    ::close(out[1]);
    input_ = in[1];
    output_ = ::fdopen(out[0], "r");
  }
  ~Program() {
    if (input_ >= 0) ::close(input_);
    if (child_ > 0) {
      ::kill(child_, SIGKILL);
      ::waitpid(child_, nullptr, 0);
    }
    std::fclose(output_);
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  /// The port that it says it serves on, among log lines; 0: it ended without one.
  unsigned port() {
    std::array<char, 4'096> line{};
    unsigned value = 0;
    while (std::fgets(line.data(), static_cast<int>(line.size()), output_) != nullptr) {
      if (std::sscanf(line.data(), "serving on port %u", &value) == 1) return value;
    }
    return 0;
  }

  /// Ends its input and waits for its exit status.
  int finish() {
    ::close(input_);
    input_ = -1;
    int status = 0;
    ::waitpid(child_, &status, 0);
    child_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  pid_t child_ = -1;
  int input_ = -1;
  std::FILE* output_ = nullptr;
};

}  // namespace

TEST_CASE("a users own architecture is served and trained and kept", "[examples]") {
  const TemporaryFolder folder;
  const auto x = torch::randn({4, 32});
  at::Tensor learned;
  {
    Program program({CUSTOM_EXPERT, "--data-dir", folder.path().string()});
    const auto port = program.port();
    REQUIRE(port > 0);
    TestCaller caller({"127.0.0.1", static_cast<std::uint16_t>(port)});
    const auto info = caller.info("gated.1");
    REQUIRE(info.has_value());
    CHECK(info->architecture == "gated_unit");
    const auto before = caller.forward("gated.1", {x}).value()[0];
    CHECK(caller.backward("gated.1", {x}, {torch::ones({4, 32})}).value()[0].sizes() == x.sizes());
    learned = caller.forward("gated.1", {x}).value()[0];
    CHECK_FALSE(same_bits(before, learned));
    CHECK(program.finish() == 0);
  }
  const auto files = expert_server::find_checkpoints(folder.path());
  REQUIRE(files.has_value());
  CHECK(expert_server::show_checkpoint(files->front())->metadata.at("architecture") == "gated_unit");
  Program again({CUSTOM_EXPERT, "--data-dir", folder.path().string()});
  TestCaller caller({"127.0.0.1", static_cast<std::uint16_t>(again.port())});
  CHECK(same_bits(caller.forward("gated.1", {x}).value()[0], learned));
  CHECK(again.finish() == 0);
}

TEST_CASE("the example says what is wrong with its command line", "[examples]") {
  Program program({CUSTOM_EXPERT, "--colour", "blue"});
  CHECK(program.port() == 0);
  CHECK(program.finish() == 2);
}
