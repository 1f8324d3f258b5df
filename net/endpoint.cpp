#include "net/endpoint.hpp"

#include <charconv>

namespace dmoe::net {
namespace {

Error bad_endpoint(std::string_view text) {
  return {Errc::kInvalidArgument,
          "'" + std::string(text) +
              "' is not an address; write HOST:PORT, e.g. 203.0.113.5:4040, "
              "seed.example:4040 or [2001:db8::5]:4040",
          {}};
}

}  // namespace

Result<Endpoint> parse_endpoint(std::string_view text) {
  std::string_view host;
  std::string_view port;
  if (text.starts_with('[')) {
    const auto close = text.find("]:");
    if (close == std::string_view::npos) return bad_endpoint(text);
    host = text.substr(1, close - 1);
    port = text.substr(close + 2);
  } else {
    // The last colon, so that an unbracketed IPv6 literal with a port ("fe80::1%lo:4000") is read as people mean it.
    const auto colon = text.rfind(':');
    if (colon == std::string_view::npos) return bad_endpoint(text);
    host = text.substr(0, colon);
    port = text.substr(colon + 1);
  }
  std::uint16_t number = 0;
  const auto [end, failure] = std::from_chars(port.data(), port.data() + port.size(), number);
  const bool port_ok = failure == std::errc{} && end == port.data() + port.size() && !port.empty();
  constexpr std::size_t kLongestHostName = 253;  // RFC 1035 §2.3.4, less the root label.
  if (!port_ok || host.empty() || host.size() > kLongestHostName) return bad_endpoint(text);
  return Endpoint{std::string(host), number};
}

std::string to_string(const Endpoint& endpoint) {
  const bool literal6 = endpoint.host.find(':') != std::string::npos;
  return (literal6 ? "[" + endpoint.host + "]" : endpoint.host) + ":" + std::to_string(endpoint.port);
}

}  // namespace dmoe::net
