// The experts that a server hosts now, by name.
#pragma once

#include "expert_server/runtime.hpp"

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <vector>

namespace dmoe::expert_server {

/// Thread-safe.
class ExpertTable {
 public:
  void add(std::shared_ptr<HostedExpert> expert);
  /// The expert that was taken out, or null.
  std::shared_ptr<HostedExpert> remove(std::string_view uid);
  std::shared_ptr<HostedExpert> find(std::string_view uid) const;
  std::vector<std::shared_ptr<HostedExpert>> all() const;
  std::vector<ExpertUid> uids() const;  ///< Ascending.

  /// While experts are still being loaded, an unknown one may be about to appear.
  void set_loading(bool loading) noexcept { loading_ = loading; }
  bool loading() const noexcept { return loading_; }

 private:
  mutable std::shared_mutex mutex_;
  std::map<std::string, std::shared_ptr<HostedExpert>, std::less<>> experts_;  // Guarded by mutex_.
  std::atomic<bool> loading_{false};
};

}  // namespace dmoe::expert_server
