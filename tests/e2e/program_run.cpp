#include "tests/e2e/program_run.hpp"

#include <poll.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <iterator>
#include <stdexcept>

namespace dmoe::test {
namespace {

/// Short enough that a wait ends soon after its condition holds.
constexpr int kLookMilliseconds = 5;

cli::ChildProcess spawn(const cli::ChildOptions& options) {
  auto child = cli::ChildProcess::spawn(options);
  if (!child) throw std::runtime_error(describe(child.error()));
  return *std::move(child);
}

bool given(const std::vector<std::string>& arguments, const std::string& flag) {
  return std::find(arguments.begin(), arguments.end(), flag) != arguments.end();
}

cli::ChildProcess spawn_node(const std::filesystem::path& directory, const std::string& name,
                             std::vector<std::string> arguments) {
  if (!given(arguments, "--listen")) arguments.insert(arguments.end(), {"--listen", "127.0.0.1:0"});
  if (!given(arguments, "--data-dir")) {
    arguments.insert(arguments.end(), {"--data-dir", (directory / name).string()});
  }
  arguments.insert(arguments.end(), {"--ready-fd", std::to_string(cli::kReadyDescriptor)});
  cli::ChildOptions options;
  options.program = DMOE_PROGRAM;
  options.arguments = std::move(arguments);
  options.log_file = directory / (name + ".log");
  options.ready_pipe = true;
  return spawn(options);
}

}  // namespace

std::filesystem::path program_under_test() { return DMOE_PROGRAM; }

Finished run_program(const std::filesystem::path& program, const std::vector<std::string>& arguments,
                     const std::vector<std::string>& environment) {
  const cli::TemporaryDirectory directory = test_directory();
  cli::ChildOptions options;
  options.program = program;
  options.arguments = arguments;
  options.environment = environment;
  options.stdout_file = directory.path() / "stdout";
  options.log_file = directory.path() / "stderr";
  cli::ChildProcess child = spawn(options);
  const auto status = child.wait(patience_ends());
  const std::string out = read_text(*options.stdout_file);
  const std::string err = read_text(options.log_file);
  if (!status) throw std::runtime_error(program.filename().string() + " did not end; it printed:\n" + out + err);
  return {*status, out, err};
}

Finished run_dmoe(const std::vector<std::string>& arguments, const std::vector<std::string>& environment) {
  return run_program(DMOE_PROGRAM, arguments, environment);
}

RunningNode::RunningNode(const std::filesystem::path& directory, const std::string& name,
                         std::vector<std::string> arguments)
    : process_(spawn_node(directory, name, std::move(arguments))) {
  const auto line = process_.ready_line(patience_ends());
  if (!line) throw std::runtime_error(name + ": " + describe(line.error()) + "; it printed:\n" + log());
  const auto ready = cli::parse_ready_line(*line);
  if (!ready) throw std::runtime_error(describe(ready.error()));
  ready_ = *ready;
}

void RunningNode::freeze() {
  process_.send(SIGSTOP);
  const bool stopped = eventually([threads = "/proc/" + std::to_string(process_.pid()) + "/task"] {
    const auto all = std::filesystem::directory_iterator(threads);
    return std::all_of(begin(all), end(all), [](const auto& thread) {
      const auto stat = read_text(thread.path() / "stat");  // "pid (name) state ...", and a name may hold anything.
      const auto name_end = stat.rfind(')');
      return name_end != std::string::npos && stat.substr(name_end + 1).starts_with(" T");
    });
  });
  if (!stopped) throw std::runtime_error("a process did not stop on SIGSTOP");
}

std::string RunningNode::log() const { return read_text(process_.log_file()); }

std::string read_text(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

void write_text(const std::filesystem::path& file, const std::string& text) {
  std::ofstream stream(file, std::ios::binary);
  stream << text;
  if (!stream.flush()) throw std::runtime_error("cannot write " + file.string());
}

bool eventually(const std::function<bool()>& condition) { return within(kPatience, condition); }

bool within(std::chrono::milliseconds time, const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + time;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    (void)poll(nullptr, 0, kLookMilliseconds);
  }
  return true;
}

cli::TemporaryDirectory test_directory() {
  auto directory = cli::TemporaryDirectory::make("dmoe-test");
  if (!directory) throw std::runtime_error(describe(directory.error()));
  return *std::move(directory);
}

}  // namespace dmoe::test
