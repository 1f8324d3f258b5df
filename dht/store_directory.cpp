#include "dht/store_directory.hpp"

#include <spdlog/spdlog.h>

#include <fcntl.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <sstream>

namespace dmoe::dht {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kFormatMarker = "dmoe-dht-records 1\n";
constexpr std::int64_t kFarAhead = std::int64_t{10} * 365 * 24 * 3600 * 1000;  // Beyond every lifetime.

Error unavailable(std::string message) { return {Errc::kUnavailable, std::move(message), {}}; }

std::string read_file(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

std::int64_t boot_millis() {
  timespec time{};
  ::clock_gettime(CLOCK_BOOTTIME, &time);
  return std::int64_t{time.tv_sec} * 1000 + time.tv_nsec / 1'000'000;
}

std::int64_t wall_millis() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

std::string boot_id() {
  std::ifstream in("/proc/sys/kernel/random/boot_id");
  std::string id;
  in >> id;
  return id.empty() ? "unknown" : id;
}

}  // namespace

Result<std::unique_ptr<DirectoryLock>> DirectoryLock::take(const fs::path& directory) {
  std::error_code error;
  fs::create_directories(directory, error);
  const fs::path file = directory / "owner";
  const int descriptor = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (descriptor < 0) {
    return unavailable("cannot write the DHT data directory " + directory.string() + ": " + std::strerror(errno) +
                       "; give another one, or make it writable");
  }
  if (::flock(descriptor, LOCK_EX | LOCK_NB) != 0) {
    if (const int why = errno; why != EWOULDBLOCK) {  // A network file system without a lock service, for example.
      ::close(descriptor);
      return unavailable("the DHT data directory " + directory.string() +
                         " is on a file system that cannot lock files (" + std::strerror(why) +
                         "): give one on a local disk");
    }
    const std::string owner = read_file(file);
    ::close(descriptor);
    return unavailable("the DHT data directory " + directory.string() + " is in use by another process" +
                       (owner.empty() ? "" : " (process " + owner + ")") +
                       ": stop that one, or give this one a directory of its own");
  }
  const std::string pid = std::to_string(::getpid());
  // Only for the message above: not being able to write it is no reason to stop.
  if (::ftruncate(descriptor, 0) != 0 || ::write(descriptor, pid.data(), pid.size()) < 0) {
    spdlog::warn("dht: cannot write {}: {}", file.string(), std::strerror(errno));
  }
  return std::unique_ptr<DirectoryLock>(new DirectoryLock(descriptor));
}

DirectoryLock::~DirectoryLock() { ::close(file_); }

Result<void> check_format(const fs::path& directory) {
  const fs::path marker = directory / "format";
  const fs::path database = directory / "records";
  std::error_code error;
  if (!fs::exists(marker, error)) {
    if (fs::exists(database, error)) {
      return unavailable(database.string() +
                         " was not written by this program (no format marker): give another data "
                         "directory, or remove it");
    }
    std::ofstream(marker, std::ios::binary) << kFormatMarker;
    return {};
  }
  const std::string found = read_file(marker);
  if (found == kFormatMarker) return {};
  if (found.empty()) {  // The disk was full, or the machine stopped, when it was made.
    std::ofstream(marker, std::ios::binary) << kFormatMarker;
    return {};
  }
  return unavailable(directory.string() + " has the format '" + found.substr(0, found.find('\n')) +
                     "', which this version cannot read: give another data directory, or remove it");
}

void move_aside(const fs::path& database, const std::string& why) {
  const fs::path aside = database.string() + ".damaged";
  std::error_code error;
  fs::remove_all(aside, error);
  fs::rename(database, aside, error);
  spdlog::warn(
      "dht: the record store {} does not open ({}); it was moved to {} and a new one is made. Records come back "
      "from other nodes and with the next announcements.",
      database.string(), why, aside.string());
}

StoreTime::StoreTime(const std::string& saved) : base_boot_(boot_millis()) {
  std::istringstream in(saved);
  std::string id;
  std::int64_t axis = 0;
  std::int64_t boot = 0;
  std::int64_t wall = 0;
  if (!(in >> id >> axis >> boot >> wall)) return;
  std::int64_t elapsed = 0;
  if (id == boot_id() && base_boot_ >= boot) {
    elapsed = base_boot_ - boot;
  } else {
    elapsed = wall_millis() - wall;
    if (elapsed < 0) elapsed = kFarAhead;
  }
  base_ = axis + std::min(elapsed, kFarAhead);
}

std::int64_t StoreTime::now() const { return base_ + boot_millis() - base_boot_; }

std::string StoreTime::save() const {
  return boot_id() + ' ' + std::to_string(now()) + ' ' + std::to_string(boot_millis()) + ' ' +
         std::to_string(wall_millis());
}

}  // namespace dmoe::dht
