#include "expert_server/announcer.hpp"

#include "expert_server/arrival.hpp"
#include "expert_server/expert_probe.hpp"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

namespace dmoe::expert_server {
namespace {

constexpr std::chrono::milliseconds kProbeLimit{1'000};      ///< Another server's answer to `info`.
constexpr std::chrono::milliseconds kSelfCallLimit{60'000};  ///< One row, while the machine may be busy loading.
constexpr std::chrono::milliseconds kAnnounceLimit{10'000};
constexpr std::chrono::milliseconds kWithdrawLimit{2'000};
/// Servers that started together see each other's records a moment after their own.
constexpr std::chrono::milliseconds kFirstCheck{1'000};

using Report = Result<dht::AnnounceReport>;

/// @return false when `stop` was requested.
bool pause_for(std::chrono::milliseconds time, const std::stop_token& stop) {
  std::mutex mutex;
  std::condition_variable_any never;
  std::unique_lock lock(mutex);
  never.wait_for(lock, stop, time, [] { return false; });
  return !stop.stop_requested();
}

std::string listed(const std::vector<ExpertUid>& uids) {
  constexpr std::size_t kMost = 8;
  std::string text;
  for (std::size_t i = 0; i < uids.size() && i < kMost; ++i) text += (i == 0 ? "" : ", ") + to_string(uids[i]);
  return uids.size() > kMost ? text + ", … (" + std::to_string(uids.size()) + ")" : text;
}

}  // namespace

Announcer::Announcer(dht::ExpertDirectory& directory, ReachCheck& reach, ExpertHost& host, net::RpcClient& client,
                     net::PeerId self, AnnouncerOptions options)
    : directory_(directory),
      reach_(reach),
      host_(host),
      client_(client),
      self_(self),
      options_(std::move(options)),
      claims_(
          directory, [this](const auto& server, const auto& uid) { return answers(server, uid); }, self,
          options_.pattern, options_.seed) {}

Announcer::~Announcer() = default;

std::size_t Announcer::wanted() const {
  return options_.num_experts != 0 ? options_.num_experts : static_cast<std::size_t>(options_.pattern.size());
}

std::set<ExpertUid> Announcer::held() const {
  const auto uids = host_.table().uids();
  return {uids.begin(), uids.end()};
}

bool Announcer::answers(const dht::ServerAddress& server, const ExpertUid& uid) {
  if (unreachable_.contains(server.peer)) return false;
  for (const auto& endpoint : server.endpoints) {
    const auto outcome = probe_info(client_, endpoint, uid, kProbeLimit);
    if (outcome) return true;
    if (outcome.error().code == Errc::kNotFound) return false;
  }
  unreachable_.insert(server.peer);
  return false;
}

Result<void> Announcer::bring_up(const ExpertUid& uid, const std::stop_token& stop) {
  if (auto loaded = host_.load(uid); !loaded) return loaded;
  const auto expert = host_.table().find(to_string(uid));
  auto answered = probe_forward(client_, options_.own, uid, expert->backend->schema(), kSelfCallLimit, stop);
  if (answered) return {};
  host_.unload(uid);
  return Error{answered.error().code,
               "expert " + to_string(uid) + " did not answer a call to itself: " + answered.error().message,
               {}};
}

std::set<ExpertUid> Announcer::restorable(const std::stop_token& stop) {
  std::set<ExpertUid> uids;
  for (const auto& uid : host_.stored()) {
    if (options_.pattern.contains(uid) && uids.size() < wanted()) uids.insert(uid);
  }
  if (uids.empty()) return uids;
  for (const auto& lost : claims_.lost_uids(uids, stop)) {
    spdlog::warn("expert {} has a checkpoint here but is hosted by peer {} now: not taken over", to_string(lost.uid),
                 net::short_string(lost.owner));
    uids.erase(lost.uid);
  }
  return uids;
}

Result<void> Announcer::start(const std::stop_token& stop) {
  host_.table().set_loading(true);
  auto uids = restorable(stop);
  const auto restored = uids.size();
  for (auto& uid : claims_.free_uids(wanted() - uids.size(), uids, /*verify=*/true, stop)) uids.insert(std::move(uid));
  if (stop.stop_requested()) return Error{Errc::kCancelled, "the start was given up", {}};
  if (uids.empty()) {
    return Error{Errc::kUnavailable,
                 "every expert of the pattern is hosted by other servers: choose another pattern, or stop one of them",
                 {}};
  }
  for (const auto& uid : uids) {
    if (stop.stop_requested()) return Error{Errc::kCancelled, "the start was given up", {}};
    if (auto up = bring_up(uid, stop); !up) return up;
  }
  host_.table().set_loading(false);
  if (uids.size() < wanted()) {
    spdlog::warn("{} of {} experts wanted: the others are hosted by other servers", uids.size(), wanted());
  }
  if (!wait_until_reached(stop)) return Error{Errc::kCancelled, "the start was given up", {}};
  if (auto told = tell(host_.table().uids(), stop); !told) return told;
  spdlog::info("hosting {} experts, {} of them from checkpoints: {}", uids.size(), restored,
               listed({uids.begin(), uids.end()}));
  thread_ = std::jthread([this](const std::stop_token& token) { run(token); });
  return {};
}

/// Until then clients would find experts that they cannot call.
bool Announcer::wait_until_reached(const std::stop_token& stop) {
  do {
    announced_ = reach_.check(stop);
    if (!announced_.empty()) return !stop.stop_requested();
  } while (pause_for(options_.heartbeat, stop));
  return false;
}

/// At the endpoints that others reach; none (where nobody could tell at first): what was announced is withdrawn.
Result<void> Announcer::announce(const std::stop_token& stop) {
  announced_ = reach_.check(stop);
  if (announced_.empty()) return tell({}, stop);
  return tell(host_.table().uids(), stop);
}

Result<void> Announcer::tell(std::vector<ExpertUid> uids, const std::stop_token& stop) {
  const auto answer = Arrival<Report>::make();
  directory_.announce(std::move(uids), announced_, options_.ttl,
                      [answer](Report report) { answer->set(std::move(report)); });
  const auto report = answer->wait(kAnnounceLimit, stop);
  if (stop.stop_requested()) return Error{Errc::kCancelled, "the announcement was given up", {}};
  if (!report) return Error{Errc::kDeadlineExceeded, "the DHT did not take the announcement in 10 s", {}};
  if (!*report) return report->error();
  if ((*report)->stored == (*report)->records) return {};
  return Error{Errc::kUnavailable,
               "the DHT took only " + std::to_string((*report)->stored) + " of " + std::to_string((*report)->records) +
                   " announcements",
               {}};
}

void Announcer::run(const std::stop_token& stop) {
  auto pause = std::min(kFirstCheck, options_.heartbeat);
  while (pause_for(pause, stop)) {
    pause = options_.heartbeat;
    unreachable_.clear();
    const bool lost = yield_lost(stop);
    const bool gained = claim_missing(stop);
    report(announce(stop));
    // A fresh claim may clash like the first one did.
    if (lost || gained) pause = std::min(kFirstCheck, options_.heartbeat);
  }
}

bool Announcer::yield_lost(const std::stop_token& stop) {
  const auto lost = claims_.lost_uids(held(), stop);
  for (const auto& claim : lost) {
    spdlog::warn("expert {} is also hosted by peer {}, which keeps it; this server looks for another UID",
                 to_string(claim.uid), net::short_string(claim.owner));
    host_.unload(claim.uid);
  }
  return !lost.empty();
}

bool Announcer::claim_missing(const std::stop_token& stop) {
  const auto mine = held();
  if (mine.size() >= wanted()) return false;
  const auto free = claims_.free_uids(wanted() - mine.size(), mine, /*verify=*/false, stop);
  bool gained = false;
  for (const auto& uid : free) {
    if (stop.stop_requested()) break;
    if (const auto up = bring_up(uid, stop); up) {
      gained = true;
      spdlog::info("expert {} is free and hosted here from now on", to_string(uid));
    } else if (up.error().code != Errc::kCancelled) {
      spdlog::error("cannot take over expert {}: {}", to_string(uid), up.error().message);
    }
  }
  return gained;
}

void Announcer::report(const Result<void>& announced) {
  if (!announced && announced.error().code == Errc::kCancelled) return;
  if (!announced && !announcing_fails_) {
    spdlog::warn("heartbeat failed, the next one is in {} s: {}", options_.heartbeat.count() / 1'000.0,
                 announced.error().message);
  }
  if (announced && announcing_fails_) spdlog::info("heartbeats reach the DHT again");
  announcing_fails_ = !announced;
}

void Announcer::withdraw() {
  if (!thread_.joinable()) return;
  thread_.request_stop();
  thread_.join();
  const auto answer = Arrival<Report>::make();
  directory_.withdraw_all([answer](Report report) { answer->set(std::move(report)); });
  if (!answer->wait(kWithdrawLimit)) spdlog::warn("the DHT did not take the withdrawal: others notice after the TTL");
}

}  // namespace dmoe::expert_server
