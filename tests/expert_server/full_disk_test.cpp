// A server whose disk fills up while it learns.
#include "expert_server/checkpoint_store.hpp"
#include "expert_server/safetensors.hpp"
#include "expert_server/server.hpp"
#include "tests/expert_server/fixtures.hpp"
#include "tests/expert_server/test_caller.hpp"
#include "tests/support/captured_log.hpp"
#include "tests/support/catch.hpp"

#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <system_error>

using namespace dmoe;
using namespace dmoe::expert_server;
using namespace dmoe::expert_server::test;
using dmoe::test::CapturedLog;
using namespace std::chrono_literals;

namespace {

bool temporary_in(const std::filesystem::path& folder) {
  std::error_code gone;  // Files come and go meanwhile.
  for (std::filesystem::recursive_directory_iterator at(folder, gone), end; !gone && at != end; at.increment(gone)) {
    if (is_temporary_name(at->path().filename().string())) return true;
  }
  return false;
}

}  // namespace

/// Run by the next test in a process of its own, which may mount.
TEST_CASE("Server on a disk that fills up", "[.child]") {
  const char* directory = std::getenv("DMOE_TEST_DIRECTORY");
  REQUIRE(directory != nullptr);
  REQUIRE(::mount("none", directory, "tmpfs", 0, "size=40m") == 0);
  const std::filesystem::path root = directory;
  ServerOptions options;
  options.listen = {"127.0.0.1", 0};
  options.expert_pattern = "ffn.[0:1]";
  options.expert.hidden_dim = 64;
  options.compute_threads = 1;
  options.data_dir = root / "data";
  options.checkpoint_period = 100ms;
  options.keep_checkpoints = 2;
  options.seed = 5;
  const auto server = Server::start(options).value();
  TestCaller caller({"127.0.0.1", server->port()});
  const auto x = torch::randn({2, 64});
  const auto learn = [&] { return caller.backward("ffn.0", {x}, {x}).has_value(); };
  REQUIRE(learn());
  REQUIRE(server->checkpoint().has_value());
  {
    std::ofstream filler(root / "filler", std::ios::binary);
    const std::vector<char> block(1U << 16U, 'x');
    while (filler.write(block.data(), static_cast<std::streamsize>(block.size())).flush()) {
    }
  }
  CheckpointStore reader(root / "data" / "checkpoints", 2);
  const auto before = reader.load(uid("ffn.0")).value().value().updates;
  const CapturedLog log;
  const auto began = std::chrono::steady_clock::now();
  for (int i = 0; i < 3; ++i) {
    REQUIRE(learn());
    const auto refused = server->checkpoint();
    REQUIRE(refused.has_error());
    CHECK(refused.error().code == Errc::kUnavailable);
    CHECK(caller.forward("ffn.0", {x}).has_value());  // It lives, and serves.
    CHECK(reader.load(uid("ffn.0")).value()->updates == before);
  }
  while (!log.warned_of("checkpoints failed") && std::chrono::steady_clock::now() < began + 30s) {
  }
  const auto periods = (std::chrono::steady_clock::now() - began) / options.checkpoint_period;
  std::size_t told = 0;
  for (const auto& line : log.warnings()) told += line.find("checkpoints failed") != std::string::npos ? 1 : 0;
  CHECK(told >= 1);
  CHECK(told <= static_cast<std::size_t>(periods) + 1);  // Once a period.
  // The timer goes on trying: a file that is being written is there for a moment, one that failed is not.
  while (temporary_in(root / "data" / "checkpoints") && std::chrono::steady_clock::now() < began + 60s) {
  }
  CHECK_FALSE(temporary_in(root / "data" / "checkpoints"));
  std::filesystem::remove(root / "filler");
  REQUIRE(learn());
  CHECK(server->checkpoint().has_value());
  CHECK(reader.load(uid("ffn.0")).value()->updates == 5);
}

TEST_CASE("d1 a server whose disk is full serves on and saves again when there is space", "[checkpoint][server][d1]") {
  const TemporaryFolder folder;
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    // Where mounting is not allowed, or would show outside (in a chroot), there is nothing to see.
    if (::unshare(CLONE_NEWNS) != 0 || ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) ::_exit(0);
    ::setenv("DMOE_TEST_DIRECTORY", folder.path().c_str(), 1);
    ::execl("/proc/self/exe", "dmoe_test_expert_server", "Server on a disk that fills up", nullptr);
    ::_exit(1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}
