#include "cli/announced_address.hpp"

#include <boost/asio/ip/address.hpp>

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <array>
#include <memory>

namespace dmoe::cli {
namespace {

boost::asio::ip::address literal(const net::Endpoint& endpoint, bool& is_literal) {
  boost::system::error_code error;
  auto address = boost::asio::ip::make_address(endpoint.host, error);
  is_literal = !error;
  return address;
}

std::string text_of(const ifaddrs& entry) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (entry.ifa_addr == nullptr || (entry.ifa_flags & IFF_LOOPBACK) != 0) return {};
  if (entry.ifa_addr->sa_family == AF_INET) {
    const auto* address = reinterpret_cast<const sockaddr_in*>(entry.ifa_addr);
    return inet_ntop(AF_INET, &address->sin_addr, text.data(), text.size()) == nullptr ? "" : text.data();
  }
  if (entry.ifa_addr->sa_family == AF_INET6) {
    const auto* address = reinterpret_cast<const sockaddr_in6*>(entry.ifa_addr);
    if (IN6_IS_ADDR_LINKLOCAL(&address->sin6_addr)) return {};
    return inet_ntop(AF_INET6, &address->sin6_addr, text.data(), text.size()) == nullptr ? "" : text.data();
  }
  return {};
}

}  // namespace

bool is_ip_address(const net::Endpoint& endpoint) {
  bool is_literal = false;
  (void)literal(endpoint, is_literal);
  return is_literal;
}

bool is_loopback(const net::Endpoint& endpoint) {
  bool is_literal = false;
  const auto address = literal(endpoint, is_literal);
  return is_literal ? address.is_loopback() : endpoint.host == "localhost";
}

bool is_wildcard(const net::Endpoint& endpoint) {
  bool is_literal = false;
  const auto address = literal(endpoint, is_literal);
  return is_literal && address.is_unspecified();
}

std::vector<std::string> candidate_addresses() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, &freeifaddrs);
  std::vector<std::string> found;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (std::string text = text_of(*entry); !text.empty()) found.push_back(std::move(text));
  }
  return found;
}

Result<std::vector<net::Endpoint>> addresses_to_announce(const net::Endpoint& listen,
                                                         std::vector<net::Endpoint> announce) {
  const bool given = !announce.empty();
  if (!given) announce.push_back(listen);
  for (const net::Endpoint& endpoint : announce) {
    if (!is_wildcard(endpoint)) continue;
    std::string message = given ? "--announce " + net::to_string(endpoint) + ": others cannot dial this address"
                                : "--listen " + net::to_string(listen) +
                                      ": add --announce HOST:PORT, the address at "
                                      "which others reach this machine";
    std::string examples;
    for (const std::string& address : candidate_addresses()) {
      examples += (examples.empty() ? "" : ", ") + net::to_string(net::Endpoint{address, listen.port});
    }
    if (!examples.empty()) message += "; its interfaces have " + examples;
    return Error{Errc::kInvalidArgument, message, {}};
  }
  return announce;
}

std::string reachability_warning(const std::vector<net::Endpoint>& announce,
                                 const std::vector<net::Endpoint>& initial_peers) {
  const bool only_loopback = std::all_of(announce.begin(), announce.end(), is_loopback);
  const auto far = std::find_if_not(initial_peers.begin(), initial_peers.end(), is_loopback);
  if (!only_loopback || far == initial_peers.end()) return {};
  return "announcing " + net::to_string(announce.front()) + " to a network that " + net::to_string(*far) +
         " belongs to: other machines cannot reach it; use --listen 0.0.0.0:PORT --announce HOST:PORT";
}

}  // namespace dmoe::cli
