// The directory of a RocksDB record store: who owns it, what format it has, and time that survives a restart.
// Private to dht.
#pragma once

#include "net/error.hpp"

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

namespace rocksdb {
class Env;
}

namespace dmoe::dht {

/// Exclusive use of a data directory, until destroyed or the process dies.
class DirectoryLock {
 public:
  /// Creates the directory where needed. kUnavailable: another process uses it (named with its process ID), or it
  /// cannot be written; says what to do.
  static Result<std::unique_ptr<DirectoryLock>> take(const std::filesystem::path& directory);
  ~DirectoryLock();
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

 private:
  explicit DirectoryLock(int file) : file_(file) {}
  int file_;
};

/// Checks or writes the format marker. kUnavailable: the directory holds something that this program did not write.
Result<void> check_format(const std::filesystem::path& directory);

/// Moves a database that does not open out of the way (one such copy is kept) so that a new one can be made.
void move_aside(const std::filesystem::path& database, const std::string& why);

/// Milliseconds on an axis that goes on over restarts and ignores changes of the wall clock: within one boot it follows
/// the boot clock (which counts suspended time too), over a reboot the wall clock, and where that went back, all that
/// was written before counts as expired.
class StoreTime {
 public:
  /// @param saved  what `save` gave before the restart; empty or unreadable: a new axis.
  explicit StoreTime(const std::string& saved);
  std::int64_t now() const;
  std::string save() const;

 private:
  std::int64_t base_ = 0;       // Axis value …
  std::int64_t base_boot_ = 0;  // … at this boot-clock time.
};

/// An Env whose file writes wait for space instead of failing: RocksDB 7.8 as Debian builds it ends the process when a
/// write fails. `give_up` lets waiting writes return without writing, for a process that ends.
class PatientEnv {
 public:
  PatientEnv();
  ~PatientEnv();
  rocksdb::Env* env() noexcept;
  void give_up() noexcept;
  /// Whether a write waits for space now.
  bool waiting() const noexcept;

  struct State;

 private:
  std::shared_ptr<State> state_;  // Shared with the files.
  std::unique_ptr<rocksdb::Env> env_;
};

}  // namespace dmoe::dht
