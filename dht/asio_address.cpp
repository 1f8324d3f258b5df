#include "dht/asio_address.hpp"

#include <algorithm>

namespace dmoe::dht {

namespace asio = boost::asio;
using asio::ip::udp;

udp::endpoint to_endpoint(const Address& address) {
  if (address.is_v4()) {
    asio::ip::address_v4::bytes_type bytes;
    std::copy_n(address.ip.begin() + 12, 4, bytes.begin());
    return {asio::ip::address_v4(bytes), address.port};
  }
  asio::ip::address_v6::bytes_type bytes;
  std::copy(address.ip.begin(), address.ip.end(), bytes.begin());
  return {asio::ip::address_v6(bytes), address.port};
}

Address to_address(const udp::endpoint& endpoint) {
  if (endpoint.address().is_v4()) return Address::v4(endpoint.address().to_v4().to_uint(), endpoint.port());
  Address address;
  const auto bytes = endpoint.address().to_v6().to_bytes();
  std::copy(bytes.begin(), bytes.end(), address.ip.begin());
  address.port = endpoint.port();
  return address;
}

}  // namespace dmoe::dht
