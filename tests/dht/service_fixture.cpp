#include "tests/dht/service_fixture.hpp"

#include "tests/support/catch.hpp"

namespace dmoe::dht::test {

Loopback::Loopback(std::size_t threads) : work_(boost::asio::make_work_guard(io_)) {
  for (std::size_t i = 0; i < threads; ++i) threads_.emplace_back([this] { io_.run(); });
}

Loopback::~Loopback() {
  work_.reset();
  io_.stop();
  for (std::thread& thread : threads_) thread.join();
}

std::unique_ptr<Service> Loopback::start(ServiceOptions options, std::optional<net::Identity> identity) {
  if (options.listen.host == "0.0.0.0") options.listen.host = "127.0.0.1";
  auto service = Service::start(io_, identity.value_or(net::Identity::generate()), std::move(options));
  INFO((service.has_value() ? "" : describe(service.error())));
  REQUIRE(service.has_value());
  return std::move(*service);
}

std::unique_ptr<Service> Loopback::start_joined(const std::vector<net::Endpoint>& peers) {
  ServiceOptions options;
  options.initial_peers = peers;
  auto service = start(std::move(options));
  const auto joined = join(*service);
  INFO((joined.has_value() ? "" : describe(joined.error())));
  REQUIRE(joined.has_value());
  return service;
}

net::Endpoint endpoint_of(const Service& service) { return {"127.0.0.1", service.port()}; }

Result<void> join(Service& service) {
  std::promise<Result<void>> promise;
  service.join([&](Result<void> result) { promise.set_value(std::move(result)); });
  return promise.get_future().get();
}

Result<StoreReport> store(Service& service, const std::string& key, const std::string& value,
                          std::chrono::milliseconds ttl) {
  std::promise<Result<StoreReport>> promise;
  service.node().clock().post([&] {
    service.node().store({Key::of(key), {}, {value.begin(), value.end()}, ttl, false},
                         [&](Result<StoreReport> result) { promise.set_value(std::move(result)); });
  });
  return promise.get_future().get();
}

Result<FindResult> find(Service& service, const std::string& key, FindOptions options) {
  std::promise<Result<FindResult>> promise;
  service.node().clock().post([&] {
    service.node().find(Key::of(key), options,
                        [&](Result<FindResult> result) { promise.set_value(std::move(result)); });
  });
  return promise.get_future().get();
}

std::string text_of(const Result<FindResult>& found) {
  if (!found.has_value()) return describe(found.error());
  if (found->records.empty()) return "(nothing)";
  const auto& value = found->records.front().record.value;
  return {value.begin(), value.end()};
}

Result<AnnounceReport> announce(Service& service, const std::vector<std::string>& uids, const net::Endpoint& endpoint,
                                std::chrono::milliseconds ttl) {
  std::vector<ExpertUid> parsed;
  for (const std::string& uid : uids) parsed.push_back(parse_expert_uid(uid).value());
  std::promise<Result<AnnounceReport>> promise;
  service.directory().announce(std::move(parsed), {endpoint}, ttl,
                               [&](Result<AnnounceReport> report) { promise.set_value(std::move(report)); });
  return promise.get_future().get();
}

std::vector<Result<PrefixListing>> list(Service& service, const std::vector<std::string>& prefixes) {
  std::vector<ExpertPrefix> parsed;
  for (const std::string& prefix : prefixes) parsed.push_back(parse_expert_prefix(prefix).value());
  std::promise<std::vector<Result<PrefixListing>>> promise;
  service.directory().list(std::move(parsed), std::chrono::steady_clock::now() + std::chrono::seconds{20},
                           [&](auto listings) { promise.set_value(std::move(listings)); });
  return promise.get_future().get();
}

ServiceStats stats(Service& service) {
  std::promise<ServiceStats> promise;
  service.stats([&](ServiceStats stats) { promise.set_value(stats); });
  return promise.get_future().get();
}

}  // namespace dmoe::dht::test
