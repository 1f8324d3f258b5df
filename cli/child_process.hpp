// A program run as a child: never outlives its owner, always reaped.
#pragma once

#include "net/error.hpp"

#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace dmoe::cli {

struct ChildOptions {
  std::filesystem::path program;
  std::vector<std::string> arguments;  ///< Without the program's name.
  std::filesystem::path log_file;      ///< Gets stdout and stderr; made or emptied.
  bool ready_pipe = false;             ///< The child gets a pipe as kReadyDescriptor; we read it with `ready_line`.
  std::optional<std::filesystem::path> stdout_file;  ///< Takes stdout instead of log_file.
  std::vector<std::string> environment;              ///< "NAME=value", in addition to ours.
  std::optional<std::uint64_t> max_open_files;       ///< Soft limit of the child's descriptors.
};

inline constexpr int kReadyDescriptor = 3;  ///< The child's end of the ready pipe: `--ready-fd 3`.

/// How a process ended.
struct ExitStatus {
  int code = 0;    ///< Meaningful when `signal` is 0.
  int signal = 0;  ///< The signal that killed it.
};

/// "exit status 1" or "killed by signal 9".
std::string describe(const ExitStatus& status);

/// One child. The kernel kills it (SIGKILL) when the thread that spawned it ends, so spawn from a thread that lives as
/// long as the child should. It has its own process group: a Ctrl-C at the terminal reaches only the parent, which
/// stops its children in its own order. Not thread-safe.
class ChildProcess {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  /// kInternal: fork, a pipe or a log file failed, or the program cannot be executed; the message says which.
  static Result<ChildProcess> spawn(const ChildOptions& options);
  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&& other) noexcept;
  ~ChildProcess();  ///< Kills what still runs, and reaps it.

  pid_t pid() const noexcept { return pid_; }
  const std::filesystem::path& log_file() const noexcept { return log_file_; }

  /// The first line that the child writes to its ready pipe, without the newline.
  /// kUnavailable: it closed the pipe without one (it most likely ended); kDeadlineExceeded.
  /// kCancelled: `abort_descriptor` became readable.
  Result<std::string> ready_line(Deadline deadline, int abort_descriptor = -1);

  /// Sends a signal; a no-op once the child was reaped.
  void send(int signal) noexcept;
  /// Its status if it ended by `deadline`; reaps it. Later calls return the same.
  std::optional<ExitStatus> wait(Deadline deadline);
  bool running() { return !wait(Deadline::min()).has_value(); }
  /// SIGTERM, and SIGKILL at the deadline; reaped on return.
  ExitStatus stop(Deadline deadline);

 private:
  ChildProcess() = default;
  void release() noexcept;

  pid_t pid_ = -1;
  int process_ = -1;  // pidfd: readable once the child ended.
  int ready_ = -1;    // Our end of the ready pipe.
  std::filesystem::path log_file_;
  std::optional<ExitStatus> status_;
};

/// The last `lines` lines of a file, each indented by two blanks; for showing a failed child's log.
std::string tail_of(const std::filesystem::path& file, std::size_t lines);

}  // namespace dmoe::cli
