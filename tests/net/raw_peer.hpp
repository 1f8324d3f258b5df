// Peers that do as they like: bytes on a socket without the client or the server of the library.
#pragma once

#include <capnp/message.h>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/websocket/stream.hpp>

#include <cstdint>
#include <string>
#include <string_view>

namespace dmoe::test {

/// A plain TCP connection to a loopback port.
class RawConnection {
 public:
  explicit RawConnection(std::uint16_t port);
  void send(std::string_view bytes);
  /// Everything until the peer closes.
  std::string read_to_end();
  /// Until `text` has come; what came so far.
  std::string read_until(std::string_view text);
  void close();

 private:
  boost::asio::io_context io_;
  boost::asio::ip::tcp::socket socket_;
};

/// A WebSocket client that sends any bytes as a frame.
class RawWebSocket {
 public:
  explicit RawWebSocket(std::uint16_t port, const std::string& protocol = "dmoe.1");

  /// The HTTP status of a refused handshake, 101 when it succeeded.
  unsigned status() const { return response_.result_int(); }
  const std::string& body() const { return response_.body(); }

  void send(std::string_view frame, bool binary = true);
  void ping();
  /// Answers to ping() that read() met.
  int pongs() const { return pongs_; }
  /// Bytes below the WebSocket layer.
  void send_raw(std::string_view bytes);
  /// The next frame; empty when the peer closed.
  std::string read();
  /// Reads until the peer closes. The close code it gave, 0 for none.
  unsigned close_code();
  std::string close_reason();

 private:
  boost::asio::io_context io_;
  boost::beast::websocket::stream<boost::asio::ip::tcp::socket> ws_;
  boost::beast::websocket::response_type response_;
  int pongs_ = 0;
};

/// A TCP port with a listener that accepts nothing by itself.
class RawListener {
 public:
  RawListener();
  std::uint16_t port() const { return acceptor_.local_endpoint().port(); }
  boost::asio::ip::tcp::socket accept() { return acceptor_.accept(); }
  void close() { acceptor_.close(); }

 private:
  boost::asio::io_context io_;
  boost::asio::ip::tcp::acceptor acceptor_;
};

/// The message in the stream framing of Cap'n Proto.
std::string flat(capnp::MessageBuilder& message);

}  // namespace dmoe::test
