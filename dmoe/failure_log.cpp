#include "dmoe/failure_log.hpp"

#include <algorithm>
#include <utility>

namespace dmoe {

std::optional<std::string> FailureLog::line(const net::PeerId& server, const std::string& text, TimePoint now) {
  while (!lines_.empty() && lines_.front() + std::chrono::minutes(1) <= now) lines_.pop_front();
  if (lines_.size() >= kLinesPerMinute || !is_due(server, now)) {
    ++left_out_;
    return std::nullopt;
  }
  lines_.push_back(now);
  const auto left_out = std::exchange(left_out_, 0);
  if (left_out == 0) return text;
  return text + " (since the line before this: " + std::to_string(left_out) + " more failures)";
}

bool FailureLog::is_due(const net::PeerId& server, TimePoint now) {
  if (servers_.size() >= kMostServers && servers_.count(server) == 0) {
    servers_.erase(std::min_element(servers_.begin(), servers_.end(), [](const auto& a, const auto& b) {
      return a.second.quiet_until < b.second.quiet_until;
    }));
  }
  auto& record = servers_[server];
  if (now < record.quiet_until) return false;
  const bool was_well = now >= record.quiet_until + kLongestPause;
  record.pause = record.pause.count() == 0 || was_well ? kFirstPause : std::min(2 * record.pause, kLongestPause);
  record.quiet_until = now + record.pause;
  return true;
}

}  // namespace dmoe
