#include "net/connection.hpp"

#include <boost/asio/ip/address.hpp>
#include <boost/beast/websocket/rfc6455.hpp>

#include <algorithm>
#include <utility>

namespace dmoe::net {
namespace {

namespace asio = boost::asio;
namespace http = boost::beast::http;
namespace websocket = boost::beast::websocket;
using asio::ip::tcp;
using boost::system::error_code;

/// An address that does not answer holds up the next one of the same name no longer than this (RFC 8305 in spirit).
constexpr std::chrono::milliseconds kAttemptTimeout{750};

boost::beast::string_view view(std::string_view text) { return {text.data(), text.size()}; }

std::string first_line(const std::string& text) {
  constexpr std::size_t kLongest = 300;
  return text.substr(0, std::min(text.find('\n'), kLongest));
}

}  // namespace

Connection::Connection(const Strand& strand, Endpoint endpoint, bool bulk, const LinkOptions& options,
                       std::chrono::milliseconds connect_timeout, std::weak_ptr<ConnectionOwner> owner)
    : Link(TcpSocket(strand), options),
      idle_since(std::chrono::steady_clock::now()),
      endpoint_(std::move(endpoint)),
      bulk_(bulk),
      connect_timeout_(connect_timeout),
      owner_(std::move(owner)),
      resolver_(strand),
      dial_timer_(strand),
      attempt_timer_(strand) {}

void Connection::dial() {
  dial_timer_.expires_after(connect_timeout_);
  dial_timer_.async_wait([self = self()](error_code cancelled) {
    if (cancelled || self->dialled_) return;
    self->fail("no connection within " + std::to_string(self->connect_timeout_.count()) + " ms (connect_timeout)");
  });
  error_code failure;
  const auto literal = asio::ip::make_address(endpoint_.host, failure);
  if (failure) return resolve();
  addresses_.emplace_back(literal, endpoint_.port);
  try_next_address();
}

void Connection::resolve() {
  resolver_.async_resolve(endpoint_.host, std::to_string(endpoint_.port),
                          [self = self()](error_code failure, const tcp::resolver::results_type& found) {
                            if (self->closed()) return;
                            if (failure) return self->fail("the name does not resolve: " + failure.message());
                            for (const auto& entry : found) self->addresses_.push_back(entry.endpoint());
                            self->try_next_address();
                          });
}

void Connection::try_next_address() {
  if (next_address_ == addresses_.size()) return fail(last_failure_);
  const auto& address = addresses_[next_address_++];
  error_code ignored;
  socket().close(ignored);
  limit_attempt();
  socket().async_connect(address, [self = self()](error_code failure) { self->on_connected(failure); });
}

void Connection::limit_attempt() {
  if (next_address_ == addresses_.size()) {
    attempt_timer_.cancel();
    return;  // The last one has all the time that is left.
  }
  attempt_timer_.expires_after(kAttemptTimeout);
  attempt_timer_.async_wait([self = self(), attempt = next_address_](error_code cancelled) {
    if (cancelled || self->closed() || self->dialled_ || attempt != self->next_address_) return;
    error_code ignored;
    self->socket().close(ignored);  // Its async_connect ends with operation_aborted, and the next address is tried.
  });
}

void Connection::on_connected(error_code failure) {
  if (closed()) return;
  if (failure) {
    last_failure_ = failure == asio::error::operation_aborted ? "no answer" : failure.message();
    return try_next_address();
  }
  attempt_timer_.cancel();
  error_code ignored;
  socket().set_option(tcp::no_delay(true), ignored);
  upgrade();
}

void Connection::upgrade() {
  websocket().set_option(websocket::stream_base::decorator(
      [](websocket::request_type& request) { request.set(http::field::sec_websocket_protocol, view(kProtocolName)); }));
  websocket().async_handshake(response_, to_string(endpoint_), view(kRpcPath),
                              [self = self()](error_code failure) { self->on_upgraded(failure); });
}

void Connection::on_upgraded(error_code failure) {
  if (closed()) return;
  if (failure == websocket::error::upgrade_declined) {
    return fail("it answered HTTP " + std::to_string(response_.result_int()) + ": " + first_line(response_.body()) +
                " (this program speaks " + std::string(kProtocolName) + ")");
  }
  if (failure) return fail(failure.message());
  const auto chosen = response_[http::field::sec_websocket_protocol];
  if (chosen != view(kProtocolName)) {
    return fail("it speaks " + (chosen.empty() ? std::string("an unnamed version") : first_line(std::string(chosen))) +
                ", this program speaks " + std::string(kProtocolName));
  }
  dialled_ = true;
  dial_timer_.cancel();
  if (const auto owner = owner_.lock()) owner->on_open(*this);
  open();
}

void Connection::fail(const std::string& what) {
  abort({Errc::kUnavailable, "cannot connect to " + to_string(endpoint_) + ": " + what, {}});
}

void Connection::on_frame(std::shared_ptr<const ReceivedFrame> frame) {
  if (const auto owner = owner_.lock()) owner->on_replies(*this, std::move(frame));
}

void Connection::on_closed(const Error& why) {
  dial_timer_.cancel();
  attempt_timer_.cancel();
  resolver_.cancel();
  if (const auto owner = owner_.lock()) owner->on_gone(*this, dialled_, why);
}

}  // namespace dmoe::net
