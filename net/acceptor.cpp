#include "net/acceptor.hpp"

#include <spdlog/spdlog.h>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>

#include <string>
#include <utility>

namespace dmoe::net {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

/// Out of descriptors or memory: a closed connection frees one, so look again soon, but never spin.
constexpr std::chrono::milliseconds kRetryPeriod{100};
constexpr std::chrono::seconds kWarningPeriod{10};

Error cannot_listen(const Endpoint& where, const error_code& failure) {
  std::string advice = ": " + failure.message();
  if (failure == asio::error::address_in_use) advice = ": the port is in use; stop that program or choose another port";
  if (failure == asio::error::access_denied) advice += "; ports below 1024 need privileges, choose a higher one";
  return {Errc::kUnavailable, "cannot listen on " + to_string(where) + advice, {}};
}

/// The address to bind: a literal, or the first that the name resolves to.
Result<tcp::endpoint> resolve(const Strand& strand, const Endpoint& where) {
  error_code failure;
  const auto literal = asio::ip::make_address(where.host, failure);
  if (!failure) return tcp::endpoint(literal, where.port);
  asio::ip::basic_resolver<tcp, Strand> resolver(strand);
  const auto found =
      resolver.resolve(where.host, std::to_string(where.port), asio::ip::resolver_base::passive, failure);
  if (failure || found.empty()) return cannot_listen(where, failure);
  return found.begin()->endpoint();
}

bool is_shortage(const error_code& failure) {
  return failure == asio::error::no_descriptors || failure == asio::error::no_buffer_space ||
         failure == asio::error::no_memory || failure == boost::system::errc::too_many_files_open_in_system;
}

}  // namespace

Acceptor::Acceptor(const Strand& strand) : strand_(strand), acceptor_(strand), retry_(strand) {}

Result<std::uint16_t> Acceptor::listen(const Endpoint& where) {
  const auto address = resolve(strand_, where);
  if (address.has_error()) return address.error();
  error_code failure;
  acceptor_.open(address->protocol(), failure);
  if (!failure) acceptor_.set_option(tcp::acceptor::reuse_address(true), failure);
  if (!failure) acceptor_.bind(*address, failure);
  if (!failure) acceptor_.listen(asio::socket_base::max_listen_connections, failure);
  if (failure) {
    error_code ignored;
    acceptor_.close(ignored);
    return cannot_listen(where, failure);
  }
  return acceptor_.local_endpoint(failure).port();
}

void Acceptor::start(std::function<void(TcpSocket)> on_connection) {
  on_connection_ = std::move(on_connection);
  asio::post(strand_, [self = shared_from_this()] { self->accept(); });
}

void Acceptor::stop() {
  error_code ignored;
  acceptor_.close(ignored);
  retry_.cancel();
}

void Acceptor::accept() {
  if (!acceptor_.is_open()) return;
  acceptor_.async_accept(asio::make_strand(strand_.get_inner_executor()),
                         [self = shared_from_this()](error_code failure, TcpSocket socket) {
                           self->on_accept(failure, std::move(socket));
                         });
}

void Acceptor::on_accept(error_code failure, TcpSocket socket) {
  if (!acceptor_.is_open()) return;
  if (failure && failure != asio::error::connection_aborted) return accept_later(failure);
  if (!failure) on_connection_(std::move(socket));
  accept();
}

void Acceptor::accept_later(const error_code& why) {
  const auto now = std::chrono::steady_clock::now();
  if (now - last_warning_ >= kWarningPeriod) {
    last_warning_ = now;
    spdlog::warn("cannot accept connections: {}{}", why.message(),
                 is_shortage(why) ? "; raise the limit on open files (ulimit -n)" : "");
  }
  retry_.expires_after(kRetryPeriod);
  retry_.async_wait([self = shared_from_this()](error_code cancelled) {
    if (!cancelled) self->accept();
  });
}

}  // namespace dmoe::net
