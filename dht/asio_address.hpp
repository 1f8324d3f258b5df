// Addresses as Asio has them.
#pragma once

#include "dht/address.hpp"

#include <boost/asio/ip/udp.hpp>

namespace dmoe::dht {

boost::asio::ip::udp::endpoint to_endpoint(const Address& address);
Address to_address(const boost::asio::ip::udp::endpoint& endpoint);

}  // namespace dmoe::dht
