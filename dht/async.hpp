// The node's operations with Asio completion tokens: callbacks, futures, `co_await`.
#pragma once

#include "dht/node.hpp"

#include <boost/asio/associated_executor.hpp>
#include <boost/asio/async_result.hpp>
#include <boost/asio/dispatch.hpp>

#include <memory>
#include <utility>

namespace dmoe::dht {

namespace detail {

/// Starts on the node's strand, completes through the token's executor. From any thread.
template <class Value, class Token, class Start>
auto initiate_on_node(Node& node, Token&& token, Start start) {
  return boost::asio::async_initiate<Token, void(Value)>(
      [&node](auto handler, Start begin) {
        // Shared: node callbacks are copyable, completion handlers need not be.
        auto shared = std::make_shared<decltype(handler)>(std::move(handler));
        node.clock().post([&node, shared, begin = std::move(begin)]() mutable {
          begin(node, [shared](Value value) {
            const auto executor = boost::asio::get_associated_executor(*shared);
            boost::asio::dispatch(
                executor, [shared, value = std::move(value)]() mutable { std::move (*shared)(std::move(value)); });
          });
        });
      },
      token, std::move(start));
}

}  // namespace detail

/// Completes with std::vector<Result<FindResult>>, one per key. `node` outlives the operation. Thread-safe.
template <class Token>
auto async_find_many(Node& node, std::vector<Key> keys, FindOptions options, Token&& token) {
  return detail::initiate_on_node<std::vector<Result<FindResult>>>(
      node, std::forward<Token>(token), [keys = std::move(keys), options](Node& on, auto done) mutable {
        on.find_many(std::move(keys), options, std::move(done));
      });
}

/// Completes with Result<FindResult>. Thread-safe.
template <class Token>
auto async_find(Node& node, Key key, FindOptions options, Token&& token) {
  return detail::initiate_on_node<Result<FindResult>>(
      node, std::forward<Token>(token),
      [key, options](Node& on, auto done) { on.find(key, options, std::move(done)); });
}

/// Completes with std::vector<Result<StoreReport>>, one per request. Thread-safe.
template <class Token>
auto async_store_many(Node& node, std::vector<StoreRequest> requests, Token&& token) {
  return detail::initiate_on_node<std::vector<Result<StoreReport>>>(
      node, std::forward<Token>(token), [requests = std::move(requests)](Node& on, auto done) mutable {
        on.store_many(std::move(requests), std::move(done));
      });
}

/// Completes with Result<StoreReport>. Thread-safe.
template <class Token>
auto async_store(Node& node, StoreRequest request, Token&& token) {
  return detail::initiate_on_node<Result<StoreReport>>(
      node, std::forward<Token>(token),
      [request = std::move(request)](Node& on, auto done) mutable { on.store(std::move(request), std::move(done)); });
}

/// Completes with Result<StoreReport>. Thread-safe.
template <class Token>
auto async_withdraw(Node& node, Key key, std::string subkey, std::chrono::milliseconds ttl, Token&& token) {
  return detail::initiate_on_node<Result<StoreReport>>(
      node, std::forward<Token>(token), [key, subkey = std::move(subkey), ttl](Node& on, auto done) mutable {
        on.withdraw(key, std::move(subkey), ttl, std::move(done));
      });
}

}  // namespace dmoe::dht
