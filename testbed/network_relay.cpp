#include "testbed/network_relay.hpp"

#include "testbed/weather.hpp"
#include "testbed/websocket_cursor.hpp"

#include <boost/asio/buffer.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/write.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <thread>
#include <utility>

namespace dmoe::testbed {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kReadBytes = 64UL * 1024;
constexpr std::size_t kMostHeld = 64UL * 1024 * 1024;

/// One direction of a connection.
class Pipe {
 public:
  struct Events {
    std::function<void()> heard;  ///< Bytes came.
    std::function<void()> ended;
  };

  Pipe(tcp::socket& from, tcp::socket& to, Weather& weather, bool replies, Events events)
      : from_(from),
        to_(to),
        weather_(weather),
        replies_(replies),
        events_(std::move(events)),
        due_(from.get_executor()),
        pace_(from.get_executor()) {}

  /// @param owner of this pipe; handlers that are pending keep it alive.
  void start(std::weak_ptr<void> owner) {
    owner_ = std::move(owner);
    read();
  }

 private:
  struct Chunk {
    Clock::time_point arrived;
    Clock::time_point due;
    std::vector<std::uint8_t> bytes;
    bool begins;
  };

  void read() {
    reading_ = true;
    from_.async_read_some(asio::buffer(buffer_),
                          [this, owner = owner_.lock()](const error_code& failure, std::size_t count) {
                            Clock::duration pause{};
                            if (failure) {
                              from_ended_ = true;
                            } else {
                              events_.heard();
                              pause = weather_.arrived(count);
                              sort(std::span<const std::uint8_t>(buffer_.data(), count));
                            }
                            write();
                            if (pause > Clock::duration::zero()) return read_after(pause);
                            reading_ = false;
                            read_on();
                          });
  }

  void read_after(Clock::duration pause) {
    pace_.expires_after(pause);
    pace_.async_wait([this, owner = owner_.lock()](const error_code& cancelled) {
      reading_ = false;
      if (!cancelled) read_on();
    });
  }

  void read_on() {
    if (!reading_ && !from_ended_ && held_ < kMostHeld) read();
  }

  void sort(std::span<const std::uint8_t> bytes) {
    const auto now = Clock::now();
    while (!bytes.empty()) {
      const auto piece = cursor_.next(bytes);
      if (piece.begins && (piece.data || first_)) fate_ = weather_.draw(replies_ && piece.data);
      if (piece.begins && !piece.data && !first_) weather_.control_frame();
      first_ = false;
      if (fate_.lost && piece.data) continue;
      last_due_ = std::max(last_due_, now + fate_.delay);
      held_ += piece.bytes.size();
      chunks_.push_back({now, last_due_, {piece.bytes.begin(), piece.bytes.end()}, piece.begins && piece.data});
    }
  }

  void write() {
    if (writing_) return;
    if (chunks_.empty()) {
      if (from_ended_) events_.ended();
      return;
    }
    writing_ = true;
    if (chunks_.front().due <= Clock::now()) return write_front();
    due_.expires_at(chunks_.front().due);
    due_.async_wait([this, owner = owner_.lock()](const error_code& cancelled) {
      if (!cancelled) write_front();
    });
  }

  void write_front() {
    auto& chunk = chunks_.front();
    if (chunk.begins) weather_.delivered(Clock::now() - chunk.arrived);
    asio::async_write(to_, asio::buffer(chunk.bytes),
                      [this, owner = owner_.lock()](const error_code& failure, std::size_t) {
                        writing_ = false;
                        if (failure) return events_.ended();
                        held_ -= chunks_.front().bytes.size();
                        chunks_.pop_front();
                        read_on();
                        write();
                      });
  }

  tcp::socket& from_;
  tcp::socket& to_;
  Weather& weather_;
  const bool replies_;
  const Events events_;
  std::weak_ptr<void> owner_;
  asio::steady_timer due_;   // Of the first chunk.
  asio::steady_timer pace_;  // Until so many bytes more may come.
  WebSocketCursor cursor_;
  Weather::Fate fate_{};
  std::array<std::uint8_t, kReadBytes> buffer_{};
  std::deque<Chunk> chunks_;  // In the order of arrival, which is that of leaving.
  std::size_t held_ = 0;      // Bytes in chunks_.
  Clock::time_point last_due_;
  bool first_ = true;
  bool reading_ = false;  // Or waiting for pace_.
  bool writing_ = false;
  bool from_ended_ = false;
};

class RelayedConnection : public std::enable_shared_from_this<RelayedConnection> {
 public:
  RelayedConnection(tcp::socket client, Weather& weather)
      : client_(std::move(client)),
        server_(client_.get_executor()),
        weather_(weather),
        silence_(client_.get_executor()),
        calls_(client_, server_, weather, false, events()),
        replies_(server_, client_, weather, true, events()) {}

  void start(std::uint16_t port) {
    server_.async_connect({asio::ip::address_v4::loopback(), port},
                          [self = shared_from_this()](const error_code& failure) {
                            if (failure) return self->close();
                            error_code ignored;
                            self->client_.set_option(tcp::no_delay(true), ignored);
                            self->server_.set_option(tcp::no_delay(true), ignored);
                            self->heard();
                            self->calls_.start(self);
                            self->replies_.start(self);
                          });
  }

  void close() {
    error_code ignored;
    client_.close(ignored);
    server_.close(ignored);
    silence_.cancel();
  }

 private:
  Pipe::Events events() {
    return {[this] { heard(); }, [this] { close(); }};
  }

  void heard() {
    const auto limit = weather_.cut_after();
    if (limit == std::chrono::milliseconds::zero() || !client_.is_open()) {
      silence_.cancel();
      return;
    }
    silence_.expires_after(limit);
    silence_.async_wait([self = shared_from_this()](const error_code& cancelled) {
      if (cancelled) return;
      self->weather_.cut();
      self->close();
    });
  }

  tcp::socket client_;
  tcp::socket server_;
  Weather& weather_;
  asio::steady_timer silence_;  // Ends when the connection said nothing for too long.
  Pipe calls_;
  Pipe replies_;
};

}  // namespace

class NetworkRelay::Impl {
 public:
  Impl(std::size_t servers, std::uint64_t seed) : weather_(seed) {
    for (std::size_t i = 0; i < servers; ++i) {
      acceptors_.emplace_back(io_, tcp::endpoint(asio::ip::address_v4::loopback(), 0));
    }
  }

  ~Impl() {
    io_.stop();
    if (thread_.joinable()) thread_.join();
  }

  std::uint16_t port(std::size_t server) const { return acceptors_.at(server).local_endpoint().port(); }

  void start(std::vector<std::uint16_t> ports) {
    ports_ = std::move(ports);
    if (ports_.size() != acceptors_.size()) throw std::runtime_error("a relay needs one server per port");
    for (std::size_t i = 0; i < ports_.size(); ++i) accept(i);
    thread_ = std::thread([this] { io_.run(); });
  }

  Weather& weather() noexcept { return weather_; }

 private:
  void accept(std::size_t server) {
    acceptors_[server].async_accept([this, server](const error_code& failure, tcp::socket client) {
      if (failure == asio::error::operation_aborted) return;
      if (!failure) {
        weather_.opened();
        std::make_shared<RelayedConnection>(std::move(client), weather_)->start(ports_[server]);
      }
      accept(server);
    });
  }

  Weather weather_;
  asio::io_context io_{1};
  std::vector<tcp::acceptor> acceptors_;
  std::vector<std::uint16_t> ports_;
  std::thread thread_;  // Runs io_.
};

NetworkRelay::NetworkRelay(std::size_t servers, std::uint64_t seed) : impl_(std::make_unique<Impl>(servers, seed)) {}
NetworkRelay::~NetworkRelay() = default;
std::uint16_t NetworkRelay::port(std::size_t server) const { return impl_->port(server); }
void NetworkRelay::start(const std::vector<std::uint16_t>& ports) { impl_->start(ports); }
void NetworkRelay::set(const LinkConditions& conditions) { impl_->weather().set(conditions); }
RelayCounts NetworkRelay::counts() const { return impl_->weather().counts(); }
void NetworkRelay::reset_counts() { impl_->weather().reset_counts(); }

DelayLaw parse_delay_law(const std::string& name) {
  if (name == "constant") return DelayLaw::kConstant;
  if (name == "exponential") return DelayLaw::kExponential;
  if (name == "weibull") return DelayLaw::kWeibull;
  throw std::runtime_error("'" + name + "' is no distribution of delays; choose constant, exponential or weibull");
}

}  // namespace dmoe::testbed
