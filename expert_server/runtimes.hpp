// The runtimes of one server: one per device.
#pragma once

#include "expert_server/runtime.hpp"

#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace dmoe::expert_server {

/// Spreads experts over devices. Thread-safe.
class Runtimes {
 public:
  /// One Runtime for each of `devices`, which may name the CPU several times: its compute threads are divided then.
  Runtimes(const std::vector<c10::Device>& devices, const RuntimeOptions& options);

  /// Chooses where an expert is to be served, moves it there, and sets HostedExpert::runtime: the runtime with the
  /// fewest. Experts that must not run beside others share the first one's thread. May throw what torch throws.
  void place(HostedExpert& expert);
  void forget(const HostedExpert& expert);  ///< It is not hosted any more.

  Runtime& of(const HostedExpert& expert) { return *runtimes_[expert.runtime]; }
  const Runtime& of(const HostedExpert& expert) const { return *runtimes_[expert.runtime]; }
  std::size_t size() const noexcept { return runtimes_.size(); }
  const c10::Device& device(std::size_t runtime) const { return devices_.at(runtime); }

  Runtime::Load load() const;                  ///< Of all together.
  void stop(std::chrono::milliseconds grace);  ///< See Runtime::stop; all at once.

 private:
  const std::vector<c10::Device> devices_;
  std::mutex mutex_;
  std::vector<std::size_t> experts_;  // Guarded by mutex_: how many each runtime serves.
  std::vector<std::unique_ptr<Runtime>> runtimes_;
};

}  // namespace dmoe::expert_server
