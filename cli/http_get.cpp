#include "cli/http_get.hpp"

#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http/empty_body.hpp>
#include <boost/beast/http/message.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/string_body.hpp>
#include <boost/beast/http/write.hpp>

#include <exception>
#include <optional>

namespace dmoe::cli {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;

constexpr std::uint64_t kMaxBody = 1'048'576;

asio::awaitable<HttpAnswer> fetch(net::Endpoint node, std::string path) {
  const auto executor = co_await asio::this_coro::executor;
  asio::ip::tcp::resolver resolver(executor);
  const std::string port = std::to_string(node.port);
  const auto addresses = co_await resolver.async_resolve(node.host, port, asio::use_awaitable);
  beast::tcp_stream stream(executor);
  co_await stream.async_connect(addresses, asio::use_awaitable);
  http::request<http::empty_body> request(http::verb::get, path, 11);
  request.set(http::field::host, net::to_string(node));
  request.set(http::field::connection, "close");
  co_await http::async_write(stream, request, asio::use_awaitable);
  beast::flat_buffer buffer(kMaxBody);
  http::response_parser<http::string_body> parser;
  parser.body_limit(kMaxBody);
  co_await http::async_read(stream, buffer, parser, asio::use_awaitable);
  co_return HttpAnswer{parser.get().result_int(), std::move(parser.get().body())};
}

}  // namespace

Result<HttpAnswer> http_get(const net::Endpoint& node, const std::string& path, std::chrono::milliseconds timeout) {
  asio::io_context io(1);
  std::optional<Result<HttpAnswer>> outcome;
  asio::co_spawn(io, fetch(node, path), [&](const std::exception_ptr& failure, HttpAnswer answer) {
    if (!failure) {
      outcome = std::move(answer);
      return;
    }
    try {
      std::rethrow_exception(failure);
    } catch (const boost::system::system_error& error) {
      outcome = Error{Errc::kUnavailable, error.code().message(), {}};
    } catch (const std::exception& error) {
      outcome = Error{Errc::kInternal, error.what(), {}};
    }
  });
  io.run_for(timeout);
  if (!outcome) return Error{Errc::kDeadlineExceeded, "no answer", {}};
  return *std::move(outcome);
}

}  // namespace dmoe::cli
