#include "expert_server/expert_table.hpp"

#include <algorithm>
#include <mutex>

namespace dmoe::expert_server {

void ExpertTable::add(std::shared_ptr<HostedExpert> expert) {
  const std::unique_lock lock(mutex_);
  experts_.insert_or_assign(expert->backend->uid_text(), std::move(expert));
}

std::shared_ptr<HostedExpert> ExpertTable::remove(std::string_view uid) {
  const std::unique_lock lock(mutex_);
  const auto found = experts_.find(uid);
  if (found == experts_.end()) return nullptr;
  auto expert = std::move(found->second);
  experts_.erase(found);
  return expert;
}

std::shared_ptr<HostedExpert> ExpertTable::find(std::string_view uid) const {
  const std::shared_lock lock(mutex_);
  const auto found = experts_.find(uid);
  return found == experts_.end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<HostedExpert>> ExpertTable::all() const {
  const std::shared_lock lock(mutex_);
  std::vector<std::shared_ptr<HostedExpert>> found;
  for (const auto& entry : experts_) found.push_back(entry.second);
  return found;
}

std::vector<ExpertUid> ExpertTable::uids() const {
  std::vector<ExpertUid> found;
  for (const auto& expert : all()) found.push_back(expert->backend->uid());
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace dmoe::expert_server
