// Real nodes on loopback for tests.
#pragma once

#include "dht/node.hpp"
#include "dht/service.hpp"
#include "net/identity.hpp"

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>

#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace dmoe::dht::test {

/// An io_context with a thread, and services on it.
class Loopback {
 public:
  explicit Loopback(std::size_t threads = 1);
  ~Loopback();
  Loopback(const Loopback&) = delete;
  Loopback& operator=(const Loopback&) = delete;

  boost::asio::io_context& io() { return io_; }
  /// Starts a service on a free port of 127.0.0.1; does not join.
  std::unique_ptr<Service> start(ServiceOptions options = {}, std::optional<net::Identity> identity = {});
  /// Starts and joins through `peers`; requires success.
  std::unique_ptr<Service> start_joined(const std::vector<net::Endpoint>& peers);

 private:
  boost::asio::io_context io_;
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_;
  std::vector<std::thread> threads_;
};

net::Endpoint endpoint_of(const Service& service);

/// Blocking forms. They wait as long as it takes: ctest ends a test that hangs.
Result<void> join(Service& service);
Result<StoreReport> store(Service& service, const std::string& key, const std::string& value,
                          std::chrono::milliseconds ttl = std::chrono::minutes{10});
Result<FindResult> find(Service& service, const std::string& key, FindOptions options = {});
std::string text_of(const Result<FindResult>& found);
Result<AnnounceReport> announce(Service& service, const std::vector<std::string>& uids, const net::Endpoint& endpoint,
                                std::chrono::milliseconds ttl = kAnnouncementTtl);
std::vector<Result<PrefixListing>> list(Service& service, const std::vector<std::string>& prefixes);
ServiceStats stats(Service& service);

/// Runs on the service's strand and waits for it.
template <class Action>
auto on_strand(Service& service, Action action) {
  std::promise<decltype(action())> promise;
  service.node().clock().post([&] {
    if constexpr (std::is_void_v<decltype(action())>) {
      action();
      promise.set_value();
    } else {
      promise.set_value(action());
    }
  });
  return promise.get_future().get();
}

}  // namespace dmoe::dht::test
