#include "tests/net/raw_peer.hpp"

#include <capnp/serialize.h>
#include <boost/asio/read.hpp>
#include <boost/asio/read_until.hpp>
#include <boost/asio/write.hpp>

namespace dmoe::test {

namespace asio = boost::asio;
namespace http = boost::beast::http;
namespace websocket = boost::beast::websocket;
using asio::ip::tcp;
using boost::system::error_code;

namespace {

tcp::endpoint loopback(std::uint16_t port) { return {asio::ip::address_v4::loopback(), port}; }

}  // namespace

RawConnection::RawConnection(std::uint16_t port) : socket_(io_) { socket_.connect(loopback(port)); }

void RawConnection::send(std::string_view bytes) {
  error_code ignored;  // The peer may have closed already: that is what some tests are about.
  asio::write(socket_, asio::buffer(bytes), ignored);
}

std::string RawConnection::read_to_end() {
  std::string bytes;
  error_code end;
  asio::read(socket_, asio::dynamic_buffer(bytes), end);
  return bytes;
}

std::string RawConnection::read_until(std::string_view text) {
  std::string bytes;
  error_code end;
  asio::read_until(socket_, asio::dynamic_buffer(bytes), std::string(text), end);
  return bytes;
}

void RawConnection::close() {
  error_code ignored;
  socket_.close(ignored);
}

RawWebSocket::RawWebSocket(std::uint16_t port, const std::string& protocol) : ws_(io_) {
  ws_.next_layer().connect(loopback(port));
  ws_.read_message_max(0);
  ws_.set_option(websocket::stream_base::decorator([protocol](websocket::request_type& request) {
    if (!protocol.empty()) request.set(http::field::sec_websocket_protocol, protocol);
  }));
  error_code refused;
  ws_.handshake(response_, "localhost", "/rpc", refused);
}

void RawWebSocket::send(std::string_view frame, bool binary) {
  ws_.binary(binary);
  ws_.auto_fragment(false);
  error_code ignored;
  ws_.write(asio::buffer(frame), ignored);
}

void RawWebSocket::ping() {
  ws_.control_callback([this](websocket::frame_type kind, boost::beast::string_view) {
    if (kind == websocket::frame_type::pong) ++pongs_;
  });
  error_code ignored;
  ws_.ping({}, ignored);
}

void RawWebSocket::send_raw(std::string_view bytes) {
  error_code ignored;
  asio::write(ws_.next_layer(), asio::buffer(bytes), ignored);
}

std::string RawWebSocket::read() {
  boost::beast::flat_buffer buffer;
  error_code end;
  ws_.read(buffer, end);
  if (end) return {};
  return {static_cast<const char*>(buffer.data().data()), buffer.size()};
}

unsigned RawWebSocket::close_code() {
  while (!read().empty()) {
  }
  return ws_.reason().code;
}

std::string RawWebSocket::close_reason() { return {ws_.reason().reason.data(), ws_.reason().reason.size()}; }

RawListener::RawListener() : acceptor_(io_, loopback(0)) {}

std::string flat(capnp::MessageBuilder& message) {
  const auto words = capnp::messageToFlatArray(message);
  const auto bytes = words.asBytes();
  return {reinterpret_cast<const char*>(bytes.begin()), bytes.size()};
}

}  // namespace dmoe::test
