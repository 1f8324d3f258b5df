#include "tests/expert_server/http_get.hpp"

#include <boost/asio/connect.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>

#include <cstdlib>

namespace dmoe::expert_server::test {

HttpAnswer http_get(const net::Endpoint& endpoint, const std::string& path) {
  namespace asio = boost::asio;
  asio::io_context io;
  asio::ip::tcp::socket socket(io);
  boost::system::error_code code;
  socket.connect({asio::ip::make_address(endpoint.host), endpoint.port}, code);
  if (code) return {};
  asio::write(socket, asio::buffer("GET " + path + " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"), code);
  std::string text;
  if (!code) asio::read(socket, asio::dynamic_buffer(text), code);
  constexpr std::size_t kStatusAt = 9;  // "HTTP/1.1 200 OK"
  if (text.size() < kStatusAt + 3) return {};
  const auto body = text.find("\r\n\r\n");
  return {static_cast<unsigned>(std::strtoul(text.c_str() + kStatusAt, nullptr, 10)),
          body == std::string::npos ? "" : text.substr(body + 4)};
}

}  // namespace dmoe::expert_server::test
