#include "dht/name_resolver.hpp"

#include "dht/asio_address.hpp"

#include <boost/asio/bind_executor.hpp>
#include <boost/asio/ip/address.hpp>
#include <boost/asio/ip/udp.hpp>

#include <memory>

namespace dmoe::dht {

namespace asio = boost::asio;
using asio::ip::udp;

Resolve system_resolver(const AsioClock::Strand& strand) {
  return [strand, resolver = std::make_shared<udp::resolver>(strand)](const net::Endpoint& peer, auto done) {
    boost::system::error_code error;
    const auto literal = asio::ip::make_address(peer.host, error);
    if (!error) return done(std::vector<Address>{to_address({literal, peer.port})});
    resolver->async_resolve(
        peer.host, std::to_string(peer.port), udp::resolver::numeric_service,
        asio::bind_executor(strand, [done](const auto& failure, const auto& found) {
          if (failure) {
            return done(Error{Errc::kUnavailable, "cannot resolve the name (" + failure.message() + ")", {}});
          }
          std::vector<Address> addresses;
          for (const auto& entry : found) addresses.push_back(to_address(entry.endpoint()));
          done(std::move(addresses));
        }));
  };
}

}  // namespace dmoe::dht
