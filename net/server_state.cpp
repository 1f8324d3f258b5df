#include "net/server_state.hpp"

#include "net/metrics.hpp"
#include "net/session.hpp"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <boost/asio/post.hpp>

#include <utility>

namespace dmoe::net {

ServerCounters::ServerCounters(Metrics* metrics) {
  if (metrics == nullptr) return;
  open = &metrics->gauge("dmoe_rpc_connections", "Open connections.");
  accepted = &metrics->counter("dmoe_rpc_connections_accepted_total", "Connections accepted.");
  refused = &metrics->counter("dmoe_rpc_connections_refused_total", "Connections dropped because the server was full.");
  malformed = &metrics->counter("dmoe_rpc_malformed_total", "Requests and frames that did not parse.");
  http_requests = &metrics->counter("dmoe_http_requests_total", "HTTP requests, upgrades included.");
  bytes_in = &metrics->counter("dmoe_rpc_received_bytes_total", "Bytes of received call frames.");
  bytes_out = &metrics->counter("dmoe_rpc_sent_bytes_total", "Bytes of sent reply frames.");
  const auto outcome = [metrics](std::string_view name) {
    return &metrics->counter("dmoe_rpc_calls_total", "Calls by outcome.", {{"outcome", std::string(name)}});
  };
  answered = outcome("ok");
  cancelled = outcome(to_string(Errc::kCancelled));
  for (const auto code : {Errc::kNotFound, Errc::kInvalidArgument, Errc::kOverloaded, Errc::kDeadlineExceeded,
                          Errc::kUnauthorized, Errc::kUnavailable, Errc::kInternal}) {
    failed[code] = outcome(to_string(code));
  }
  failed[Errc::kCancelled] = cancelled;
}

void ServerCounters::add(prometheus::Counter* counter, double amount) {
  if (counter != nullptr) counter->Increment(amount);
}

void ServerCounters::count_outcome(const Error* error) const {
  if (error == nullptr) return add(answered);
  const auto found = failed.find(error->code);
  if (found != failed.end()) add(found->second);
}

void ServerCounters::count_connections(int change) const {
  if (open != nullptr) open->Increment(change);
}

bool ServerState::admit(const std::shared_ptr<Session>& session) {
  const auto victim = is_full() ? oldest_idle() : nullptr;
  if (victim) forget(victim.get());
  {
    const std::lock_guard lock(mutex_);
    if (sessions_.size() >= options.max_connections) return false;
    sessions_.emplace(session.get(), session);
    session->admitted_ = true;
  }
  counters.count_connections(1);
  if (victim) {
    boost::asio::post(victim->strand(), [victim] {
      victim->abort({Errc::kUnavailable, "closed in favour of a new connection", {}});
    });
  }
  return true;
}

std::shared_ptr<Session> ServerState::oldest_idle() const {
  std::shared_ptr<Session> oldest;
  // A copy: the last owner of a session must not end inside the lock that its destructor takes.
  for (const auto& session : sessions()) {
    if (!session->idle()) continue;
    if (!oldest || session->idle_since() < oldest->idle_since()) oldest = session;
  }
  return oldest;
}

bool ServerState::is_full() const {
  const std::lock_guard lock(mutex_);
  return sessions_.size() >= options.max_connections;
}

void ServerState::forget(const Session* session) {
  std::vector<std::function<void()>> done;
  {
    const std::lock_guard lock(mutex_);
    if (sessions_.erase(session) == 0) return;
    if (sessions_.empty()) done.swap(when_empty_);
  }
  counters.count_connections(-1);
  for (const auto& notify : done) notify();
}

std::vector<std::shared_ptr<Session>> ServerState::sessions() const {
  std::vector<std::shared_ptr<Session>> alive;
  const std::lock_guard lock(mutex_);
  alive.reserve(sessions_.size());
  for (const auto& [key, weak] : sessions_) {
    if (auto session = weak.lock()) alive.push_back(std::move(session));
  }
  return alive;
}

void ServerState::when_empty(std::function<void()> done) {
  {
    const std::lock_guard lock(mutex_);
    if (!sessions_.empty()) {
      when_empty_.push_back(std::move(done));
      return;
    }
  }
  done();
}

}  // namespace dmoe::net
