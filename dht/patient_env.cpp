#include "dht/store_directory.hpp"

#include <rocksdb/env.h>
#include <rocksdb/file_system.h>
#include <spdlog/spdlog.h>

#include <sys/statvfs.h>

#include <atomic>
#include <condition_variable>
#include <filesystem>
#include <mutex>

namespace dmoe::dht {

struct PatientEnv::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::atomic<int> waiting{0};
  bool gave_up = false;                          // GUARDED_BY(mutex)
  std::chrono::steady_clock::time_point warned;  // GUARDED_BY(mutex)
};

namespace {

constexpr std::uint64_t kSpare = 4UL << 20U;  // Bytes left free, for what others write between check and write.
constexpr std::chrono::milliseconds kLookAgain{250};
constexpr std::chrono::seconds kWarnAgain{60};

std::uint64_t free_bytes(const std::string& directory) {
  struct statvfs info {};
  if (::statvfs(directory.c_str(), &info) != 0) return UINT64_MAX;  // Let the write itself say what is wrong.
  return std::uint64_t{info.f_bavail} * info.f_frsize;
}

class PatientFile final : public rocksdb::FSWritableFileOwnerWrapper {
 public:
  PatientFile(std::unique_ptr<rocksdb::FSWritableFile> file, std::string directory,
              std::shared_ptr<PatientEnv::State> state)
      : FSWritableFileOwnerWrapper(std::move(file)), directory_(std::move(directory)), state_(std::move(state)) {}

  rocksdb::IOStatus Append(const rocksdb::Slice& data, const rocksdb::IOOptions& options,
                           rocksdb::IODebugContext* context) override {
    if (!wait_for(data.size())) return rocksdb::IOStatus::OK();
    return FSWritableFileOwnerWrapper::Append(data, options, context);
  }
  rocksdb::IOStatus Append(const rocksdb::Slice& data, const rocksdb::IOOptions& options,
                           const rocksdb::DataVerificationInfo& info, rocksdb::IODebugContext* context) override {
    if (!wait_for(data.size())) return rocksdb::IOStatus::OK();
    return FSWritableFileOwnerWrapper::Append(data, options, info, context);
  }

 private:
  /// @return false once given up: the process ends, and what is missing is found damaged at the next start.
  bool wait_for(std::size_t bytes) {
    if (free_bytes(directory_) >= bytes + kSpare) return true;
    std::unique_lock lock(state_->mutex);
    ++state_->waiting;
    while (!state_->gave_up && free_bytes(directory_) < bytes + kSpare) {
      const auto now = std::chrono::steady_clock::now();
      if (now - state_->warned >= kWarnAgain) {
        state_->warned = now;
        spdlog::warn("dht: the disk of {} is full: records stay in memory until there is space", directory_);
      }
      state_->changed.wait_for(lock, kLookAgain);
    }
    --state_->waiting;
    return !state_->gave_up;
  }

  std::string directory_;
  std::shared_ptr<PatientEnv::State> state_;  // Shared: files outlive the Env's owner during shutdown.
};

class PatientFileSystem final : public rocksdb::FileSystemWrapper {
 public:
  explicit PatientFileSystem(std::shared_ptr<PatientEnv::State> state)
      : FileSystemWrapper(rocksdb::FileSystem::Default()), state_(std::move(state)) {}

  const char* Name() const override { return "PatientFileSystem"; }

  rocksdb::IOStatus NewWritableFile(const std::string& name, const rocksdb::FileOptions& options,
                                    std::unique_ptr<rocksdb::FSWritableFile>* result,
                                    rocksdb::IODebugContext* context) override {
    return wrap(name, FileSystemWrapper::NewWritableFile(name, options, result, context), result);
  }
  rocksdb::IOStatus ReopenWritableFile(const std::string& name, const rocksdb::FileOptions& options,
                                       std::unique_ptr<rocksdb::FSWritableFile>* result,
                                       rocksdb::IODebugContext* context) override {
    return wrap(name, FileSystemWrapper::ReopenWritableFile(name, options, result, context), result);
  }
  rocksdb::IOStatus ReuseWritableFile(const std::string& name, const std::string& old,
                                      const rocksdb::FileOptions& options,
                                      std::unique_ptr<rocksdb::FSWritableFile>* result,
                                      rocksdb::IODebugContext* context) override {
    return wrap(name, FileSystemWrapper::ReuseWritableFile(name, old, options, result, context), result);
  }

 private:
  rocksdb::IOStatus wrap(const std::string& name, rocksdb::IOStatus status,
                         std::unique_ptr<rocksdb::FSWritableFile>* result) {
    if (status.ok()) {
      *result =
          std::make_unique<PatientFile>(std::move(*result), std::filesystem::path(name).parent_path().string(), state_);
    }
    return status;
  }

  std::shared_ptr<PatientEnv::State> state_;
};

}  // namespace

PatientEnv::PatientEnv()
    : state_(std::make_shared<State>()), env_(rocksdb::NewCompositeEnv(std::make_shared<PatientFileSystem>(state_))) {}

PatientEnv::~PatientEnv() = default;

rocksdb::Env* PatientEnv::env() noexcept { return env_.get(); }

void PatientEnv::give_up() noexcept {
  const std::lock_guard lock(state_->mutex);
  state_->gave_up = true;
  state_->changed.notify_all();
}

bool PatientEnv::waiting() const noexcept { return state_->waiting != 0; }

}  // namespace dmoe::dht
