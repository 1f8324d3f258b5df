// Plain HTTP on the port, and the upgrade to calls.
#include "net/session.hpp"

#include <boost/beast/http/read.hpp>
#include <boost/beast/http/write.hpp>
#include <boost/beast/websocket/rfc6455.hpp>

#include <exception>
#include <utility>

namespace dmoe::net {
namespace {

namespace http = boost::beast::http;
namespace websocket = boost::beast::websocket;
using boost::system::error_code;

constexpr std::uint32_t kMaxHeaderBytes = 8 * 1024;
constexpr std::size_t kHttpBufferBytes = 16UL * 1024;

std::string peer_name(const TcpSocket& socket) {
  error_code failure;
  const auto endpoint = socket.remote_endpoint(failure);
  if (failure) return "a peer that left";
  return to_string(Endpoint{endpoint.address().to_string(), endpoint.port()});
}

LinkOptions link_options_of(const RpcServerOptions& options) {
  LinkOptions link;
  link.peer = ReceivedFrame::From::kClient;
  link.max_frame_bytes = options.max_frame_bytes;
  link.handshake_timeout = options.handshake_timeout;
  link.ping_after = options.idle_timeout / 2;
  link.dead_after = options.idle_timeout;
  link.frame_budget = options.frame_budget;
  link.frame_patience = options.frame_patience;
  link.arrival_timeout = options.arrival_timeout;
  return link;
}

std::string_view path_of(boost::beast::string_view target) {
  const std::string_view text(target.data(), target.size());
  return text.substr(0, text.find('?'));
}

http::response<http::string_body> plain(http::status status, unsigned version, std::string body) {
  http::response<http::string_body> response(status, version);
  response.set(http::field::content_type, "text/plain; charset=utf-8");
  response.body() = std::move(body);
  return response;
}

/// What a request that does not parse is told; nothing for a connection that just ended.
std::optional<http::status> status_for(const error_code& failure) {
  if (failure == http::error::header_limit || failure == http::error::buffer_overflow) {
    return http::status::request_header_fields_too_large;
  }
  if (failure == http::error::body_limit) return http::status::payload_too_large;
  if (failure.category() == make_error_code(http::error::bad_method).category() &&
      failure != http::error::end_of_stream && failure != http::error::partial_message) {
    return http::status::bad_request;
  }
  return std::nullopt;
}

bool offers_protocol(boost::beast::string_view offered) {
  boost::beast::http::token_list tokens(offered);
  return tokens.exists(boost::beast::string_view(kProtocolName.data(), kProtocolName.size()));
}

}  // namespace

Session::Session(TcpSocket socket, std::shared_ptr<ServerState> server)
    : Link(std::move(socket), link_options_of(server->options)),
      server_(std::move(server)),
      peer_(peer_name(this->socket())),
      http_buffer_(kHttpBufferBytes),
      idle_since_(std::chrono::steady_clock::now().time_since_epoch().count()) {}

Session::~Session() {
  if (admitted_) server_->forget(this);
}

void Session::start() { read_request(); }

void Session::expect_request_within_timeout() {
  request_deadline_ = std::chrono::steady_clock::now() + server_->options.handshake_timeout;
}

void Session::read_request() {
  parser_.emplace();
  parser_->header_limit(kMaxHeaderBytes);
  parser_->body_limit(server_->options.max_http_body_bytes);
  expect_request_within_timeout();
  http::async_read(socket(), http_buffer_, *parser_,
                   [self = std::static_pointer_cast<Session>(shared_from_this())](error_code failure, std::size_t) {
                     self->on_request(failure);
                   });
}

void Session::on_request(error_code failure) {
  if (closed()) return;
  if (failure) {
    const auto status = status_for(failure);
    if (!status) return abort(link_error(peer_, failure));
    ServerCounters::add(server_->counters.malformed);
    auto response = plain(*status, 11, "this is not a request that this server reads: " + failure.message() + "\n");
    response.keep_alive(false);
    return respond(std::move(response));
  }
  handle(parser_->release());
}

void Session::handle(Request request) {
  ServerCounters::add(server_->counters.http_requests);
  if (websocket::is_upgrade(request) && path_of(request.target()) == kRpcPath &&
      offers_protocol(request[http::field::sec_websocket_protocol]) && http_buffer_.size() == 0) {
    return upgrade(request);
  }
  auto response = websocket::is_upgrade(request) ? refusal(request) : answer(request);
  response.keep_alive(request.keep_alive() && !websocket::is_upgrade(request));
  response.prepare_payload();
  if (request.method() == http::verb::head) response.body().clear();  // The length stays: it is what GET would send.
  respond(std::move(response));
}

Session::Response Session::answer(const Request& request) const {
  const auto version = request.version();
  if (path_of(request.target()) == kRpcPath) return refusal(request);
  if (server_->stopped) return plain(http::status::service_unavailable, version, "this server is shutting down\n");
  const auto route = server_->routes.find(path_of(request.target()));
  if (route == server_->routes.end()) {
    std::string known;
    for (const auto& [path, handler] : server_->routes) known += " " + path;
    return plain(http::status::not_found, version, "there is nothing here; this server has" + known + "\n");
  }
  if (request.method() != http::verb::get && request.method() != http::verb::head) {
    auto response = plain(http::status::method_not_allowed, version, "only GET and HEAD work here\n");
    response.set(http::field::allow, "GET, HEAD");
    return response;
  }
  try {
    auto page = route->second();
    auto response = plain(http::int_to_status(page.status), version, std::move(page.body));
    response.result(page.status);
    response.set(http::field::content_type, page.content_type);
    return response;
  } catch (const std::exception& failure) {
    return plain(http::status::internal_server_error, version, std::string(failure.what()) + "\n");
  }
}

Session::Response Session::refusal(const Request& request) const {
  if (path_of(request.target()) != kRpcPath) {
    return plain(http::status::not_found, request.version(), "calls are served at " + std::string(kRpcPath) + "\n");
  }
  if (http_buffer_.size() != 0) {
    return plain(http::status::bad_request, request.version(), "frames may follow only the answer to the upgrade\n");
  }
  const auto offered = request[http::field::sec_websocket_protocol];
  auto response =
      plain(http::status::upgrade_required, request.version(),
            "this server speaks " + std::string(kProtocolName) + ", the client speaks " +
                (offered.empty() ? std::string("an unnamed version") : std::string(offered.data(), offered.size())) +
                "; run the same release on both sides\n");
  response.set(http::field::upgrade, "websocket");
  return response;
}

void Session::respond(Response response) {
  if (!response.has_content_length()) response.prepare_payload();
  response_ = std::move(response);
  expect_request_within_timeout();  // The peer must also read what it asked for.
  http::async_write(socket(), *response_,
                    [self = std::static_pointer_cast<Session>(shared_from_this())](error_code failure, std::size_t) {
                      if (self->closed()) return;
                      if (failure) return self->abort(link_error(self->peer_, failure));
                      if (self->response_->need_eof() || !self->response_->keep_alive()) {
                        self->socket().shutdown(TcpSocket::shutdown_send, failure);
                        return self->linger();
                      }
                      self->read_request();
                    });
}

/// Closing over unread bytes resets the connection, and the peer might lose the answer: read until it closes, or the
/// request deadline ends it.
void Session::linger() {
  http_buffer_.clear();
  socket().async_read_some(
      http_buffer_.prepare(kHttpBufferBytes / 2),
      [self = std::static_pointer_cast<Session>(shared_from_this())](error_code failure, std::size_t) {
        if (self->closed()) return;
        if (failure) return self->abort({Errc::kUnavailable, "the HTTP exchange is over", {}});
        self->linger();
      });
}

void Session::upgrade(const Request& request) {
  upgrade_request_ = request;
  websocket().set_option(websocket::stream_base::decorator([](websocket::response_type& response) {
    response.set(http::field::sec_websocket_protocol,
                 boost::beast::string_view(kProtocolName.data(), kProtocolName.size()));
  }));
  websocket().async_accept(upgrade_request_,
                           [self = std::static_pointer_cast<Session>(shared_from_this())](error_code failure) {
                             if (self->closed()) return;
                             if (failure) return self->abort(link_error(self->peer_, failure));
                             self->request_deadline_.reset();
                             self->parser_.reset();
                             self->upgrade_request_ = {};
                             self->http_buffer_ = boost::beast::flat_buffer{};
                             self->open();
                           });
}

void Session::tick(std::chrono::steady_clock::time_point now) {
  if (request_deadline_ && now >= *request_deadline_) {
    return abort({Errc::kUnavailable, "no complete request in time", {}});
  }
  watch(now);
}

}  // namespace dmoe::net
