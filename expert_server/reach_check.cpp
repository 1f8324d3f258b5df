#include "expert_server/reach_check.hpp"

#include "dht/asio_address.hpp"
#include "dht/service.hpp"
#include "expert_server/arrival.hpp"

#include <boost/asio/io_context.hpp>

#include <spdlog/spdlog.h>

#include <algorithm>
#include <string>
#include <utility>

namespace dmoe::expert_server {
namespace {

using boost::asio::ip::udp;

constexpr std::chrono::milliseconds kAnswerLimit{10'000};  ///< Two requests that fail, each with a dial.

/// Empty when the name does not resolve.
std::vector<dht::Address> addresses_of(const net::Endpoint& endpoint) {
  boost::asio::io_context io;
  boost::system::error_code error;
  std::vector<dht::Address> addresses;
  for (const auto& entry :
       udp::resolver(io).resolve(endpoint.host, std::to_string(endpoint.port), udp::resolver::numeric_service, error)) {
    addresses.push_back(dht::to_address(entry.endpoint()));
  }
  return addresses;
}

bool share_one(const std::vector<dht::Address>& left, const std::vector<dht::Address>& right) {
  return std::find_first_of(left.begin(), left.end(), right.begin(), right.end()) != left.end();
}

}  // namespace

ReachCheck::ReachCheck(dht::Service& dht, const std::vector<net::Endpoint>& announced) : dht_(dht) {
  for (const net::Endpoint& endpoint : announced) states_.push_back({{endpoint, dht::Reach::kUnknown}, false});
}

std::vector<net::Endpoint> ReachCheck::check(const std::stop_token& stop) {
  std::vector<net::Endpoint> usable;
  for (State& state : states_) {
    if (!state.settled && !stop.stop_requested()) look_at(state, stop);
    if (state.announced.reach != dht::Reach::kUnreachable) usable.push_back(state.announced.endpoint);
  }
  return usable;
}

/// Other helpers, as likely as not, confirm a refusal.
void ReachCheck::look_at(State& state, const std::stop_token& stop) {
  const net::Endpoint& endpoint = state.announced.endpoint;
  const auto addresses = addresses_of(endpoint);
  for (int round = 0; round < 2; ++round) {
    const dht::DialReport report = ask(endpoint.port, stop);
    if (stop.stop_requested()) return;
    if (share_one(report.reached, addresses)) {
      state.settled = true;
      return set(state, dht::Reach::kReachable);
    }
    if (!share_one(report.unreached, addresses)) {
      if (report.reached.empty() && report.unreached.empty()) return;  // Nobody could tell: later.
      const auto& seen_at = report.reached.empty() ? report.unreached : report.reached;
      spdlog::info("{} is announced as told, untested: others see this server at {}", net::to_string(endpoint),
                   dht::to_string(seen_at.front()));
      state.settled = true;
      return set(state, dht::Reach::kUnknown);
    }
  }
  set(state, dht::Reach::kUnreachable);
}

dht::DialReport ReachCheck::ask(std::uint16_t port, const std::stop_token& stop) {
  const auto answer = Arrival<dht::DialReport>::make();
  dht_.test_dial(port, [answer](dht::DialReport report) { answer->set(std::move(report)); });
  return answer->wait(kAnswerLimit, stop).value_or(dht::DialReport{});
}

void ReachCheck::set(State& state, dht::Reach reach) {
  const std::string where = net::to_string(state.announced.endpoint);
  if (reach == state.announced.reach) return;
  if (reach == dht::Reach::kReachable) spdlog::info("other nodes reach this server at {} (TCP)", where);
  if (reach == dht::Reach::kUnreachable) {
    spdlog::warn(
        "other nodes cannot reach this server at {} (TCP): it is not announced until they do; open that port, or say "
        "with announce (--announce host:port) where others reach this server",
        where);
  }
  const std::lock_guard lock(mutex_);
  state.announced.reach = reach;
}

std::vector<AnnouncedEndpoint> ReachCheck::latest() const {
  const std::lock_guard lock(mutex_);
  std::vector<AnnouncedEndpoint> all;
  for (const State& state : states_) all.push_back(state.announced);
  return all;
}

}  // namespace dmoe::expert_server
