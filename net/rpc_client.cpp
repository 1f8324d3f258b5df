#include "net/rpc_client.hpp"

#include "net/client_pool.hpp"

#include <boost/asio/associated_cancellation_slot.hpp>
#include <boost/asio/associated_executor.hpp>
#include <boost/asio/async_result.hpp>
#include <boost/asio/dispatch.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/strand.hpp>
#include <boost/asio/use_awaitable.hpp>

#include <stdexcept>
#include <utility>

namespace dmoe::net {

namespace asio = boost::asio;

namespace {

Strand strand_on(const asio::any_io_executor& executor) {
  if (const auto* plain = executor.target<asio::io_context::executor_type>()) return asio::make_strand(*plain);
  if (const auto* strand = executor.target<Strand>()) return asio::make_strand(strand->get_inner_executor());
  throw std::invalid_argument("RpcClient needs the executor of an asio::io_context, or of a strand over one");
}

}  // namespace

RpcClient::RpcClient(asio::any_io_executor executor, RpcClientOptions options)
    : pool_(std::make_shared<Pool>(strand_on(executor), options)) {}

RpcClient::~RpcClient() { stop(); }

std::vector<CallId> RpcClient::start(const Endpoint& endpoint, std::vector<CallSpec> calls) {
  return pool_->start(endpoint, std::move(calls));
}

void RpcClient::cancel(CallId id) { pool_->cancel(id); }
void RpcClient::check(std::vector<CallId> ids) { pool_->check(std::move(ids)); }
void RpcClient::stop() { pool_->stop(); }

asio::awaitable<Result<IncomingReply>> RpcClient::call(Endpoint endpoint,
                                                       std::chrono::steady_clock::time_point deadline,
                                                       std::function<void(schema::Call::Builder, Attachments&)> fill) {
  auto start = [pool = pool_, &endpoint, deadline, &fill](auto handler) {
    // The id first: the cancellation slot must know it before a reply can take the handler away.
    const CallId id = pool->new_id();
    auto slot = asio::get_associated_cancellation_slot(handler);
    if (slot.is_connected()) {
      slot.assign([pool, id](asio::cancellation_type) { pool->cancel(id); });
    }
    const auto executor = asio::get_associated_executor(handler);
    // Shared: std::function is copyable, the handler is not.
    auto shared = std::make_shared<decltype(handler)>(std::move(handler));
    pool->start_as(id, endpoint, CallSpec{std::move(fill), deadline, [shared, executor](Result<IncomingReply> result) {
                                            asio::dispatch(executor, [shared, result = std::move(result)]() mutable {
                                              std::move (*shared)(std::move(result));
                                            });
                                          }});
  };
  co_return co_await asio::async_initiate<const asio::use_awaitable_t<>, void(Result<IncomingReply>)>(
      std::move(start), asio::use_awaitable);
}

}  // namespace dmoe::net
