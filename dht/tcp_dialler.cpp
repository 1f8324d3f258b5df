#include "dht/tcp_dialler.hpp"

#include "dht/asio_address.hpp"

#include <boost/asio/ip/tcp.hpp>

#include <utility>

namespace dmoe::dht {

struct TcpDialler::Attempt {
  explicit Attempt(const AsioClock::Strand& strand) : socket(strand), limit(strand) {}

  boost::asio::ip::tcp::socket socket;
  boost::asio::steady_timer limit;
  std::function<void(bool)> done;
};

void TcpDialler::dial(const Address& to, std::function<void(bool)> done) {
  if (stopped_) return;
  const auto attempt = std::make_shared<Attempt>(strand_);
  attempt->done = std::move(done);
  open_.insert(attempt);
  const auto udp = to_endpoint(to);
  attempt->limit.expires_after(kDialLimit);
  attempt->limit.async_wait([self = shared_from_this(), attempt](const boost::system::error_code& error) {
    if (!error) self->finish(attempt, false);
  });
  attempt->socket.async_connect(
      {udp.address(), udp.port()},
      [self = shared_from_this(), attempt](const boost::system::error_code& error) { self->finish(attempt, !error); });
}

void TcpDialler::finish(const std::shared_ptr<Attempt>& attempt, bool connected) {
  if (open_.erase(attempt) == 0) return;
  boost::system::error_code ignored;
  attempt->socket.close(ignored);
  attempt->limit.cancel();
  std::exchange(attempt->done, {})(connected);
}

void TcpDialler::stop() {
  stopped_ = true;
  for (const auto& attempt : std::exchange(open_, {})) {
    boost::system::error_code ignored;
    attempt->socket.close(ignored);
    attempt->limit.cancel();
  }
}

}  // namespace dmoe::dht
