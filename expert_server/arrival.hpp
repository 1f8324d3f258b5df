// One value that another thread delivers: how the server's own threads wait for asynchronous answers.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <utility>

namespace dmoe::expert_server {

/// Held by shared_ptr: the answer may come after nobody waits any more. Thread-safe; one waiter.
template <class T>
class Arrival {
 public:
  static std::shared_ptr<Arrival> make() { return std::make_shared<Arrival>(); }

  void set(T value) {
    {
      const std::lock_guard lock(mutex_);
      value_ = std::move(value);
    }
    arrived_.notify_all();
  }

  /// The value, or nothing when `limit` passed or `stop` was requested first.
  std::optional<T> wait(std::chrono::milliseconds limit, const std::stop_token& stop = {}) {
    std::unique_lock lock(mutex_);
    arrived_.wait_for(lock, stop, limit, [this] { return value_.has_value(); });
    return std::exchange(value_, std::nullopt);
  }

 private:
  std::mutex mutex_;
  std::condition_variable_any arrived_;
  std::optional<T> value_;  // Guarded by mutex_.
};

}  // namespace dmoe::expert_server
