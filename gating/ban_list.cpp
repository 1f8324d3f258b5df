#include "gating/ban_list.hpp"

#include <algorithm>

namespace dmoe::gating {
namespace {

template <class Map>
void drop_ended(Map& bans, BanView::TimePoint now) {
  for (auto it = bans.begin(); it != bans.end();) it = it->second.until <= now ? bans.erase(it) : std::next(it);
}

template <class Map>
void drop_first_to_end(Map& bans) {
  const auto oldest = std::min_element(bans.begin(), bans.end(),
                                       [](const auto& a, const auto& b) { return a.second.until < b.second.until; });
  bans.erase(oldest);
}

}  // namespace

bool deserves_ban(Errc code) noexcept {
  switch (code) {
    case Errc::kInvalidArgument:
    case Errc::kCancelled:
    case Errc::kLost: return false;
    default: return true;
  }
}

bool BanView::banned(const ExpertUid& uid, const dht::ServerAddress& server) const {
  if (const auto it = servers_.find(server.peer); it != servers_.end() && server.announced <= it->second.announced) {
    return true;
  }
  if (experts_.empty()) return false;
  const auto it = experts_.find({uid, server.peer});
  return it != experts_.end() && server.announced <= it->second.announced;
}

void BanList::ban_expert(const ExpertUid& uid, const dht::ServerAddress& server, TimePoint now,
                         std::optional<std::chrono::milliseconds> time) {
  const std::lock_guard lock(mutex_);
  drop_ended(bans_.experts_, now);
  if (bans_.experts_.size() >= kMaxBans) drop_first_to_end(bans_.experts_);
  bans_.experts_[{uid, server.peer}] = {server.announced, now + time.value_or(ban_time_)};
  changed();
}

void BanList::ban_server(const dht::ServerAddress& server, TimePoint now) {
  const std::lock_guard lock(mutex_);
  drop_ended(bans_.servers_, now);
  if (bans_.servers_.size() >= kMaxBans) drop_first_to_end(bans_.servers_);
  bans_.servers_[server.peer] = {server.announced, now + ban_time_};
  changed();
}

void BanList::lift_server(const net::PeerId& peer) {
  const std::lock_guard lock(mutex_);
  if (bans_.servers_.erase(peer) > 0) changed();
}

void BanList::lift_experts(const net::PeerId& peer) {
  const std::lock_guard lock(mutex_);
  if (std::erase_if(bans_.experts_, [&](const auto& ban) { return ban.first.second == peer; }) > 0) changed();
}

std::shared_ptr<const BanView> BanList::view(TimePoint now) {
  const std::lock_guard lock(mutex_);
  if (view_ && now < view_->first_end_) return view_;
  drop_ended(bans_.servers_, now);
  drop_ended(bans_.experts_, now);
  auto view = std::make_shared<BanView>(bans_);
  view->generation_ = generation_.load(std::memory_order_relaxed);
  for (const auto& [peer, ban] : bans_.servers_) view->first_end_ = std::min(view->first_end_, ban.until);
  for (const auto& [key, ban] : bans_.experts_) view->first_end_ = std::min(view->first_end_, ban.until);
  view_ = view;
  return view;
}

void BanList::changed() {
  generation_.fetch_add(1, std::memory_order_acq_rel);
  view_.reset();
}

}  // namespace dmoe::gating
