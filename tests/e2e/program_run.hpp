// Runs programs for tests: to their end, or as servers that say when they are ready.
#pragma once

#include "cli/child_process.hpp"
#include "cli/ready_line.hpp"
#include "cli/temporary_directory.hpp"

#include <chrono>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace dmoe::test {

/// For things that must happen: long enough for a busy machine, short enough to notice that they never will.
inline constexpr std::chrono::seconds kPatience{60};
inline std::chrono::steady_clock::time_point patience_ends() { return std::chrono::steady_clock::now() + kPatience; }

/// The `dmoe` program.
std::filesystem::path program_under_test();

/// What a finished program left.
struct Finished {
  cli::ExitStatus status;
  std::string out;  ///< stdout
  std::string err;  ///< stderr
};

/// Runs `program` to its end. Throws when it does not end within kPatience.
Finished run_program(const std::filesystem::path& program, const std::vector<std::string>& arguments,
                     const std::vector<std::string>& environment = {});
/// The `dmoe` program under test.
Finished run_dmoe(const std::vector<std::string>& arguments, const std::vector<std::string>& environment = {});

/// A `dmoe serve` or `dmoe dht run` that is up.
class RunningNode {
 public:
  /// Adds `--listen 127.0.0.1:0`, `--data-dir` (unless given) and `--ready-fd`, and waits for the ready line. Throws
  /// when there is none, with the program's output. Logs go to `<directory>/<name>.log`, data to `<directory>/<name>`.
  RunningNode(const std::filesystem::path& directory, const std::string& name, std::vector<std::string> arguments);

  const cli::ReadyLine& ready() const noexcept { return ready_; }
  net::Endpoint endpoint() const { return ready_.announced.front(); }
  std::string address() const { return net::to_string(endpoint()); }
  cli::ChildProcess& process() noexcept { return process_; }
  /// SIGSTOP, and waits until no thread of it runs any more: on a busy machine they go on for a while.
  void freeze();
  std::string log() const;

 private:
  cli::ChildProcess process_;
  cli::ReadyLine ready_;
};

/// The whole file as text.
std::string read_text(const std::filesystem::path& file);
void write_text(const std::filesystem::path& file, const std::string& text);

/// Repeats `condition` until it holds; false when it did not within kPatience. For conditions of other processes, which
/// cannot be waited on: between two looks the thread yields to them.
bool eventually(const std::function<bool()>& condition);
/// The same, for `time` at most.
bool within(std::chrono::milliseconds time, const std::function<bool()>& condition);

/// A directory for one test case. Throws when none can be made.
cli::TemporaryDirectory test_directory();

}  // namespace dmoe::test
