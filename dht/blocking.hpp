// The node's operations for threads that may wait.
#pragma once

#include "dht/node.hpp"

#include <future>
#include <memory>
#include <utility>

namespace dmoe::dht {

/// Waits for each answer. Use it from threads that do not run the node's strand (it would wait for itself), while the
/// strand is run by another and the node has not been destroyed.
class BlockingDht {
 public:
  /// `node` outlives this object.
  explicit BlockingDht(Node& node) : node_(node) {}

  Result<StoreReport> store(StoreRequest request) {
    return wait<Result<StoreReport>>([&](auto done) { node_.store(std::move(request), std::move(done)); });
  }
  std::vector<Result<StoreReport>> store_many(std::vector<StoreRequest> requests) {
    return wait<std::vector<Result<StoreReport>>>(
        [&](auto done) { node_.store_many(std::move(requests), std::move(done)); });
  }
  Result<FindResult> find(Key key, FindOptions options = {}) {
    return wait<Result<FindResult>>([&](auto done) { node_.find(key, options, std::move(done)); });
  }
  std::vector<Result<FindResult>> find_many(std::vector<Key> keys, FindOptions options = {}) {
    return wait<std::vector<Result<FindResult>>>(
        [&](auto done) { node_.find_many(std::move(keys), options, std::move(done)); });
  }
  Result<StoreReport> withdraw(Key key, std::string subkey, std::chrono::milliseconds ttl) {
    return wait<Result<StoreReport>>([&](auto done) { node_.withdraw(key, std::move(subkey), ttl, std::move(done)); });
  }
  Result<PingReport> ping(const Address& address) {
    return wait<Result<PingReport>>([&](auto done) { node_.ping(address, std::move(done)); });
  }

 private:
  template <class Value, class Start>
  Value wait(Start start) {
    // Shared: the strand may still hold the callback when the waiting thread has its value.
    const auto promise = std::make_shared<std::promise<Value>>();
    auto answer = promise->get_future();
    node_.clock().post([&] { start([promise](Value value) { promise->set_value(std::move(value)); }); });
    return answer.get();
  }

  Node& node_;
};

}  // namespace dmoe::dht
