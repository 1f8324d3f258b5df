#include "bench/network_relay.hpp"

#include "bench/websocket_cursor.hpp"

#include <boost/asio/buffer.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/write.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <stdexcept>
#include <thread>
#include <utility>

namespace dmoe::bench {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kReadBytes = 64UL * 1024;
constexpr std::size_t kMostHeld = 64UL * 1024 * 1024;

/// What all connections share.
class Weather {
 public:
  explicit Weather(std::uint64_t seed) : random_(seed) {}

  void set(const LinkConditions& conditions) {
    const std::lock_guard lock(mutex_);
    conditions_ = conditions;
  }

  struct Fate {
    Clock::duration delay;
    bool lost;
  };

  Fate draw(bool reply) {
    const std::lock_guard lock(mutex_);
    ++counts_.messages;
    const bool lost = reply && std::uniform_real_distribution<>()(random_) < conditions_.lost_replies;
    counts_.lost += lost ? 1U : 0U;
    return {std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double, std::milli>(delay_ms())), lost};
  }

  void delivered(Clock::duration delay) {
    const std::lock_guard lock(mutex_);
    ++delivered_;
    delay_sum_ms_ += std::chrono::duration<double, std::milli>(delay).count();
  }

  RelayCounts take() {
    const std::lock_guard lock(mutex_);
    auto counts = std::exchange(counts_, {});
    const auto delivered = std::exchange(delivered_, 0);
    const double sum = std::exchange(delay_sum_ms_, 0);
    if (delivered > 0) counts.mean_delay_ms = sum / static_cast<double>(delivered);
    return counts;
  }

 private:
  double delay_ms() {
    const double mean = conditions_.delay_ms;
    if (mean <= 0) return 0;
    switch (conditions_.law) {
      case DelayLaw::kConstant: return mean;
      case DelayLaw::kExponential: return std::exponential_distribution<>(1 / mean)(random_);
      case DelayLaw::kWeibull: break;
    }
    const double scale = mean / std::tgamma(1 + 1 / conditions_.shape);
    return std::weibull_distribution<>(conditions_.shape, scale)(random_);
  }

  std::mutex mutex_;
  LinkConditions conditions_;  // Guarded by mutex_, as are the following.
  std::mt19937_64 random_;
  RelayCounts counts_;
  std::uint64_t delivered_ = 0;
  double delay_sum_ms_ = 0;
};

/// One direction of a connection.
class Pipe {
 public:
  Pipe(tcp::socket& from, tcp::socket& to, Weather& weather, bool replies, std::function<void()> ended)
      : from_(from),
        to_(to),
        weather_(weather),
        replies_(replies),
        ended_(std::move(ended)),
        timer_(from.get_executor()) {}

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
                            reading_ = false;
                            if (failure) {
                              from_ended_ = true;
                            } else {
                              sort(std::span<const std::uint8_t>(buffer_.data(), count));
                            }
                            write();
                            if (!from_ended_ && held_ < kMostHeld) read();
                          });
  }

  void sort(std::span<const std::uint8_t> bytes) {
    const auto now = Clock::now();
    while (!bytes.empty()) {
      const auto piece = cursor_.next(bytes);
      if (piece.begins && (piece.data || first_)) fate_ = weather_.draw(replies_ && piece.data);
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
      if (from_ended_) ended_();
      return;
    }
    writing_ = true;
    if (chunks_.front().due <= Clock::now()) return write_front();
    timer_.expires_at(chunks_.front().due);
    timer_.async_wait([this, owner = owner_.lock()](const error_code& cancelled) {
      if (!cancelled) write_front();
    });
  }

  void write_front() {
    auto& chunk = chunks_.front();
    if (chunk.begins) weather_.delivered(Clock::now() - chunk.arrived);
    asio::async_write(to_, asio::buffer(chunk.bytes),
                      [this, owner = owner_.lock()](const error_code& failure, std::size_t) {
                        writing_ = false;
                        if (failure) return ended_();
                        held_ -= chunks_.front().bytes.size();
                        chunks_.pop_front();
                        if (!reading_ && !from_ended_ && held_ < kMostHeld) read();
                        write();
                      });
  }

  tcp::socket& from_;
  tcp::socket& to_;
  Weather& weather_;
  const bool replies_;
  const std::function<void()> ended_;
  std::weak_ptr<void> owner_;
  asio::steady_timer timer_;
  WebSocketCursor cursor_;
  Weather::Fate fate_{};
  std::array<std::uint8_t, kReadBytes> buffer_{};
  std::deque<Chunk> chunks_;  // In the order of arrival, which is that of leaving.
  std::size_t held_ = 0;      // Bytes in chunks_.
  Clock::time_point last_due_;
  bool first_ = true;
  bool reading_ = false;
  bool writing_ = false;
  bool from_ended_ = false;
};

class RelayedConnection : public std::enable_shared_from_this<RelayedConnection> {
 public:
  RelayedConnection(tcp::socket client, Weather& weather)
      : client_(std::move(client)),
        server_(client_.get_executor()),
        calls_(client_, server_, weather, false, [this] { close(); }),
        replies_(server_, client_, weather, true, [this] { close(); }) {}

  void start(std::uint16_t port) {
    server_.async_connect({asio::ip::address_v4::loopback(), port},
                          [self = shared_from_this()](const error_code& failure) {
                            if (failure) return self->close();
                            error_code ignored;
                            self->client_.set_option(tcp::no_delay(true), ignored);
                            self->server_.set_option(tcp::no_delay(true), ignored);
                            self->calls_.start(self);
                            self->replies_.start(self);
                          });
  }

  void close() {
    error_code ignored;
    client_.close(ignored);
    server_.close(ignored);
  }

 private:
  tcp::socket client_;
  tcp::socket server_;
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
      if (!failure) std::make_shared<RelayedConnection>(std::move(client), weather_)->start(ports_[server]);
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
RelayCounts NetworkRelay::take_counts() { return impl_->weather().take(); }

DelayLaw parse_delay_law(const std::string& name) {
  if (name == "constant") return DelayLaw::kConstant;
  if (name == "exponential") return DelayLaw::kExponential;
  if (name == "weibull") return DelayLaw::kWeibull;
  throw std::runtime_error("'" + name + "' is no distribution of delays; choose constant, exponential or weibull");
}

}  // namespace dmoe::bench
