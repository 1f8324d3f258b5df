#include "tests/net/relay.hpp"

#include <boost/asio/steady_timer.hpp>
#include <boost/asio/write.hpp>

#include <array>
#include <utility>

namespace dmoe::test {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

/// One connection and the one behind it. Runs on the relay's thread; lives as long as an operation is in flight.
class Relay::Pipe : public std::enable_shared_from_this<Pipe> {
 public:
  Pipe(Relay& relay, tcp::socket client)
      : relay_(relay), client_(std::move(client)), server_(relay.io_), silence_(relay.io_) {}

  void start() {
    server_.async_connect({asio::ip::address_v4::loopback(), relay_.target_},
                          [self = shared_from_this()](error_code failure) {
                            if (failure) return self->close();
                            self->watch();
                            self->pump(self->up_);
                            self->pump(self->down_);
                          });
  }

 private:
  using Bytes = std::array<char, 64UL * 1024>;

  struct Direction {
    Direction(Relay& relay, tcp::socket& source, tcp::socket& sink, bool is_up)
        : from(source), to(sink), pause(relay.io_), up(is_up) {}
    tcp::socket& from;
    tcp::socket& to;
    asio::steady_timer pause;
    bool up;
    Bytes bytes{};
  };

  void pump(Direction& way) {
    way.from.async_read_some(asio::buffer(way.bytes),
                             [self = shared_from_this(), &way](error_code failure, std::size_t count) {
                               if (failure) return self->close();
                               self->watch();
                               if (way.up) {
                                 ++self->relay_.pieces_;
                                 self->relay_.to_target_ += count;
                               }
                               self->pass_on(way, count);
                             });
  }

  void pass_on(Direction& way, std::size_t count) {
    asio::async_write(way.to, asio::buffer(way.bytes, count),
                      [self = shared_from_this(), &way, count](error_code failure, std::size_t) {
                        if (failure) return self->close();
                        if (self->relay_.bytes_per_second_ == 0) return self->pump(way);
                        const std::chrono::duration<double> due(static_cast<double>(count) /
                                                                static_cast<double>(self->relay_.bytes_per_second_));
                        way.pause.expires_after(std::chrono::duration_cast<std::chrono::nanoseconds>(due));
                        way.pause.async_wait([self, &way](error_code cancelled) {
                          if (!cancelled) self->pump(way);
                        });
                      });
  }

  void watch() {
    silence_.expires_after(relay_.cut_after_);
    silence_.async_wait([self = shared_from_this()](error_code cancelled) {
      if (cancelled) return;
      ++self->relay_.cut_;
      self->close();
    });
  }

  void close() {
    error_code ignored;
    client_.close(ignored);
    server_.close(ignored);
    silence_.cancel();
    up_.pause.cancel();
    down_.pause.cancel();
  }

  Relay& relay_;
  tcp::socket client_;
  tcp::socket server_;
  asio::steady_timer silence_;
  Direction up_{relay_, client_, server_, true};
  Direction down_{relay_, server_, client_, false};
};

Relay::Relay(std::uint16_t target, std::chrono::milliseconds cut_after, std::uint64_t bytes_per_second)
    : acceptor_(io_, tcp::endpoint(asio::ip::address_v4::loopback(), 0)),
      target_(target),
      cut_after_(cut_after),
      bytes_per_second_(bytes_per_second) {
  port_ = acceptor_.local_endpoint().port();
  accept();
  thread_ = std::thread([this] { io_.run(); });
}

Relay::~Relay() {
  io_.stop();
  thread_.join();
}

void Relay::accept() {
  acceptor_.async_accept([this](error_code failure, tcp::socket client) {
    if (failure) return;
    ++connections_;
    std::make_shared<Pipe>(*this, std::move(client))->start();
    accept();
  });
}

}  // namespace dmoe::test
