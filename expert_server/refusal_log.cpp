#include "expert_server/refusal_log.hpp"

#include <spdlog/spdlog.h>

#include <utility>

namespace dmoe::expert_server {
namespace {

/// The address without the port, which differs with each connection.
std::string host_of(const std::string& caller) {
  const auto colon = caller.rfind(':');
  return colon == std::string::npos ? caller : caller.substr(0, colon);
}

}  // namespace

bool RefusalLog::may_speak(const std::string& caller, TimePoint now) {
  if (period_began_ == TimePoint{} || now - period_began_ >= kPeriod) {
    period_began_ = now;
    lines_ = 0;
    std::erase_if(told_, [&](const auto& entry) { return now - entry.second >= kPeriod; });
  }
  if (lines_ >= kMostLines) return false;
  const auto [entry, first] = told_.try_emplace(caller, now);
  if (!first && now - entry->second < kPeriod) return false;
  entry->second = now;
  ++lines_;
  return true;
}

void RefusalLog::note(const std::string& caller, const Error& error) {
  const auto host = host_of(caller);
  std::size_t left_out = 0;
  {
    const std::lock_guard lock(mutex_);
    if (!may_speak(host, clock_())) {
      ++left_out_;
      return;
    }
    left_out = std::exchange(left_out_, 0);
  }
  spdlog::warn(
      "a call from {} was refused, nothing to do here unless it is yours: {} ({} refusals were not told before)", host,
      error.message, left_out);
}

}  // namespace dmoe::expert_server
