#include "cli/child_process.hpp"

#include <fcntl.h>
#include <linux/close_range.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <deque>
#include <fstream>
#include <system_error>
#include <utility>

extern char** environ;

namespace dmoe::cli {
namespace {

using Clock = std::chrono::steady_clock;

Error system_failure(const std::string& doing, int number) {
  return {Errc::kInternal, doing + ": " + std::generic_category().message(number), {}};
}

/// A file descriptor that closes itself.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) noexcept : fd_(fd) {}
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    reset();
    fd_ = std::exchange(other.fd_, -1);
    return *this;
  }
  int get() const noexcept { return fd_; }
  int release() noexcept { return std::exchange(fd_, -1); }
  void reset() noexcept {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }

 private:
  int fd_;
};

struct Pipe {
  Descriptor read;
  Descriptor write;
};

Result<Pipe> make_pipe() {
  std::array<int, 2> fds{};
  if (pipe2(fds.data(), O_CLOEXEC) != 0) return system_failure("cannot make a pipe", errno);
  return Pipe{Descriptor(fds[0]), Descriptor(fds[1])};
}

Result<Descriptor> open_output(const std::filesystem::path& file) {
  const int fd = open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (fd < 0) return system_failure("cannot write " + file.string(), errno);
  return Descriptor(fd);
}

/// Everything that the child needs between fork and exec, laid out beforehand: allocation is not allowed there.
struct Launch {
  std::vector<char*> arguments;
  std::vector<char*> environment;
  const char* program = nullptr;
  pid_t parent = 0;
  int input = -1;
  int output = -1;
  int log = -1;
  int ready = -1;    // Becomes kReadyDescriptor.
  int failure = -1;  // Gets errno when exec fails.
  std::optional<rlimit> files;
};

/// Runs in the child: only calls that are safe after fork in a process with threads.
[[noreturn]] void become(const Launch& launch) noexcept {
  (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != launch.parent) _exit(127);  // The parent died before the line above.
  (void)setpgid(0, 0);
  // High numbers first, so that no dup2 below overwrites one that is still needed.
  const int failure = fcntl(launch.failure, F_DUPFD_CLOEXEC, 64);
  const int ready = launch.ready < 0 ? -1 : fcntl(launch.ready, F_DUPFD_CLOEXEC, 64);
  const int log = fcntl(launch.log, F_DUPFD_CLOEXEC, 64);
  const int output = fcntl(launch.output, F_DUPFD_CLOEXEC, 64);
  (void)dup2(launch.input, STDIN_FILENO);
  (void)dup2(output, STDOUT_FILENO);
  (void)dup2(log, STDERR_FILENO);
  if (ready >= 0) (void)dup2(ready, kReadyDescriptor);
  // Nothing else of ours is the child's business: a socket kept open there would outlive its close here.
  (void)syscall(SYS_close_range, ready >= 0 ? kReadyDescriptor + 1 : kReadyDescriptor, ~0U, CLOSE_RANGE_CLOEXEC);
  if (launch.files) (void)setrlimit(RLIMIT_NOFILE, &*launch.files);
  sigset_t none{};
  sigemptyset(&none);
  for (const int number : {SIGPIPE, SIGINT, SIGTERM}) (void)signal(number, SIG_DFL);
  (void)sigprocmask(SIG_SETMASK, &none, nullptr);
  execve(launch.program, launch.arguments.data(), launch.environment.data());
  const int number = errno;
  (void)!write(failure, &number, sizeof(number));
  _exit(127);
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (std::string& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

std::vector<std::string> environment_with(const std::vector<std::string>& more) {
  std::vector<std::string> all = more;  // The first of two equal names wins in getenv.
  for (char** variable = environ; variable != nullptr && *variable != nullptr; ++variable) all.emplace_back(*variable);
  return all;
}

/// Milliseconds for poll(2), rounded up so that a wait never ends early.
int poll_time(Clock::time_point deadline) {
  if (deadline == Clock::time_point::min()) return 0;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 3'600'000));
}

/// Whether the descriptor became readable by the deadline.
bool wait_readable(int fd, Clock::time_point deadline) {
  for (;;) {
    pollfd entry{fd, POLLIN, 0};
    const int count = poll(&entry, 1, poll_time(deadline));
    if (count > 0) return true;
    if (count == 0 && (deadline == Clock::time_point::min() || Clock::now() >= deadline)) return false;
    if (count < 0 && errno != EINTR) return false;
  }
}

}  // namespace

std::string describe(const ExitStatus& status) {
  return status.signal != 0 ? "killed by signal " + std::to_string(status.signal)
                            : "exit status " + std::to_string(status.code);
}

Result<ChildProcess> ChildProcess::spawn(const ChildOptions& options) {
  auto failure = make_pipe();
  if (!failure) return failure.error();
  auto log = open_output(options.log_file);
  if (!log) return log.error();
  Descriptor output;
  if (options.stdout_file) {
    auto opened = open_output(*options.stdout_file);
    if (!opened) return opened.error();
    output = *std::move(opened);
  }
  Pipe ready;
  if (options.ready_pipe) {
    auto made = make_pipe();
    if (!made) return made.error();
    ready = *std::move(made);
  }
  const Descriptor input(open("/dev/null", O_RDONLY | O_CLOEXEC));

  std::vector<std::string> arguments{options.program.string()};
  arguments.insert(arguments.end(), options.arguments.begin(), options.arguments.end());
  std::vector<std::string> environment = environment_with(options.environment);
  Launch launch;
  launch.arguments = pointers(arguments);
  launch.environment = pointers(environment);
  launch.program = options.program.c_str();
  launch.parent = getpid();
  launch.input = input.get();
  launch.log = log->get();
  launch.output = output.get() >= 0 ? output.get() : log->get();
  launch.ready = ready.write.get();
  launch.failure = failure->write.get();
  if (options.max_open_files) launch.files = rlimit{*options.max_open_files, *options.max_open_files};

  // Until it has its own handlers, the child must not run ours: they write to a pipe that it shares with us.
  sigset_t all{};
  sigset_t before{};
  sigfillset(&all);
  (void)pthread_sigmask(SIG_SETMASK, &all, &before);
  const pid_t pid = fork();
  if (pid == 0) become(launch);
  const int fork_error = errno;
  (void)pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (pid < 0) return system_failure("cannot start a process", fork_error);
  ChildProcess child;
  child.pid_ = pid;
  child.log_file_ = options.log_file;
  child.ready_ = ready.read.release();
  child.process_ = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (child.process_ < 0) return system_failure("cannot watch a process", errno);
  failure->write.reset();
  int number = 0;  // EOF: exec closed the pipe, so it succeeded.
  if (read(failure->read.get(), &number, sizeof(number)) == static_cast<ssize_t>(sizeof(number))) {
    return system_failure("cannot run " + options.program.string(), number);
  }
  return child;
}

ChildProcess::ChildProcess(ChildProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      process_(std::exchange(other.process_, -1)),
      ready_(std::exchange(other.ready_, -1)),
      log_file_(std::move(other.log_file_)),
      status_(std::exchange(other.status_, std::nullopt)) {}

ChildProcess& ChildProcess::operator=(ChildProcess&& other) noexcept {
  if (this != &other) {
    release();
    pid_ = std::exchange(other.pid_, -1);
    process_ = std::exchange(other.process_, -1);
    ready_ = std::exchange(other.ready_, -1);
    log_file_ = std::move(other.log_file_);
    status_ = std::exchange(other.status_, std::nullopt);
  }
  return *this;
}

ChildProcess::~ChildProcess() { release(); }

void ChildProcess::release() noexcept {
  if (pid_ > 0 && !status_) {
    (void)::kill(pid_, SIGKILL);
    (void)waitpid(pid_, nullptr, 0);
  }
  if (process_ >= 0) close(process_);
  if (ready_ >= 0) close(ready_);
  pid_ = process_ = ready_ = -1;
}

Result<std::string> ChildProcess::ready_line(Deadline deadline, int abort_descriptor) {
  std::string line;
  for (;;) {
    std::array<pollfd, 2> fds{pollfd{ready_, POLLIN, 0}, pollfd{abort_descriptor, POLLIN, 0}};
    const int count = poll(fds.data(), fds.size(), poll_time(deadline));
    if (count < 0 && errno != EINTR) return system_failure("cannot wait for a process", errno);
    if (count > 0 && fds[1].revents != 0) return Error{Errc::kCancelled, "interrupted", {}};
    if (count <= 0) {
      if (Clock::now() < deadline) continue;
      return Error{Errc::kDeadlineExceeded, "process " + std::to_string(pid_) + " did not become ready in time", {}};
    }
    char byte = 0;  // One at a time: the line is short and nothing after it may be taken.
    const ssize_t got = read(ready_, &byte, 1);
    if (got == 1 && byte == '\n') return line;
    if (got == 1) line += byte;
    if (got == 0) {
      return Error{Errc::kUnavailable, "process " + std::to_string(pid_) + " ended before it became ready", {}};
    }
  }
}

void ChildProcess::send(int signal) noexcept {
  if (pid_ > 0 && !status_) (void)::kill(pid_, signal);
}

std::optional<ExitStatus> ChildProcess::wait(Deadline deadline) {
  if (status_ || pid_ <= 0) return status_;
  if (!wait_readable(process_, deadline)) return std::nullopt;
  int raw = 0;
  if (waitpid(pid_, &raw, 0) == pid_) {
    status_ = WIFSIGNALED(raw) ? ExitStatus{0, WTERMSIG(raw)} : ExitStatus{WEXITSTATUS(raw), 0};
  }
  return status_;
}

ExitStatus ChildProcess::stop(Deadline deadline) {
  send(SIGTERM);
  if (const auto status = wait(deadline)) return *status;
  send(SIGKILL);
  return wait(Clock::now() + std::chrono::hours(1)).value_or(ExitStatus{0, SIGKILL});
}

std::string tail_of(const std::filesystem::path& file, std::size_t lines) {
  std::ifstream stream(file);
  std::deque<std::string> last;
  for (std::string line; std::getline(stream, line);) {
    last.push_back(std::move(line));
    if (last.size() > lines) last.pop_front();
  }
  std::string text;
  for (const std::string& line : last) text += "  " + line + "\n";
  return text;
}

}  // namespace dmoe::cli
