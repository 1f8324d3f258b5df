#include "dht/service.hpp"

#include "dht/asio_clock.hpp"
#include "dht/bootstrap.hpp"
#include "dht/memory_store.hpp"
#include "dht/node.hpp"
#include "dht/random_source.hpp"
#include "dht/rocksdb_store.hpp"
#include "dht/tcp_dialler.hpp"
#include "dht/udp_network.hpp"

#include <spdlog/spdlog.h>
#include <boost/asio/dispatch.hpp>
#include <boost/asio/post.hpp>

#include <atomic>
#include <future>
#include <utility>

namespace dmoe::dht {

class Service::Impl : public std::enable_shared_from_this<Impl> {
 public:
  Impl(boost::asio::io_context& io, net::Identity identity, ServiceOptions options)
      : io_(io),
        clock_(std::make_shared<AsioClock>(boost::asio::make_strand(io))),
        signer_(std::move(identity)),
        options_(std::move(options)) {}

  Result<void> start() {
    auto network = UdpNetwork::open(clock_->strand(), options_.listen);
    if (!network.has_value()) return network.error();
    network_ = std::move(*network);
    if (options_.data_dir) {
      auto store = RocksDbStore::open(*options_.data_dir / "dht", StoreLimits{});
      if (!store.has_value()) return store.error();
      store_ = std::move(*store);
    } else {
      store_ = std::make_unique<MemoryStore>();
    }
    NodeOptions node_options;
    node_options.client_only = options_.client_only;
    node_options.detect_reach = !options_.client_only;
    node_ = std::make_unique<Node>(*network_, *clock_, secure_random_source(), *store_, signer_, node_options);
    dialler_ = std::make_shared<TcpDialler>(clock_->strand());
    node_->set_dialler(dialler_.get());
    directory_ = std::make_unique<ExpertDirectory>(*node_);
    port_ = network_->port();
    boost::asio::post(clock_->strand(), [self = shared_from_this()] {
      if (self->stopped_) return;
      self->running_ = true;
      self->node_->on_reach(tell_reach);
      self->clock_->start();
      self->network_->start();
    });
    return {};
  }

  void join(std::function<void(Result<void>)> handler) {
    boost::asio::dispatch(clock_->strand(), [self = shared_from_this(), handler = std::move(handler)]() mutable {
      if (self->stopped_) {
        return handler(Error{Errc::kCancelled, "the DHT service has stopped", {}});
      }
      self->bootstrap_ =
          std::make_shared<Bootstrap>(*self->node_, self->clock_, system_resolver(self->clock_->strand()),
                                      Bootstrap::Accepts{self->network_->takes_v4(), self->network_->takes_v6()},
                                      self->options_.initial_peers, self->options_.join_timeout);
      self->bootstrap_->start(std::move(handler));
    });
  }

  void stats(std::function<void(ServiceStats)> handler) {
    boost::asio::dispatch(clock_->strand(), [self = shared_from_this(), handler = std::move(handler)] {
      if (self->stopped_) return handler({});
      const NodeStats node = self->node_->stats();
      handler(
          {node.known_nodes, node.store.records, node.datagrams_sent, node.datagrams_received, node.datagrams_refused});
    });
  }

  void test_dial(std::uint16_t port, std::function<void(DialReport)> handler) {
    boost::asio::dispatch(clock_->strand(), [self = shared_from_this(), port, handler = std::move(handler)]() mutable {
      if (self->stopped_) return handler({});
      self->node_->test_dial(port, std::move(handler));
    });
  }

  void stop() {
    if (std::exchange(stop_called_, true)) return;
    // Nobody runs the strand: never started to, or stopped for good.
    if (!running_ || io_.stopped() || clock_->strand().running_in_this_thread()) return shut_down();
    std::promise<void> done;
    boost::asio::post(clock_->strand(), [this, &done] {
      shut_down();
      // After the handlers that the shutdown has just queued.
      boost::asio::post(clock_->strand(), [&done] { done.set_value(); });
    });
    auto finished = done.get_future();
    while (finished.wait_for(std::chrono::milliseconds{50}) != std::future_status::ready) {
      if (io_.stopped()) return shut_down();  // Stopped in between: what was posted will not run.
    }
  }

  std::uint16_t port() const noexcept { return port_; }
  ExpertDirectory& directory() noexcept { return *directory_; }
  Node& node() noexcept { return *node_; }

 private:
  static void tell_reach(Reach reach, const std::optional<Address>& observed) {
    const std::string at = observed ? " at " + to_string(*observed) : std::string();
    if (reach == Reach::kUnreachable) {
      spdlog::warn(
          "dht: other nodes cannot reach this one{} (NAT or firewall): it acts as a client, holding no records; open "
          "that UDP port to change it",
          at);
    } else {
      spdlog::info("dht: other nodes reach this one{} again: it holds records", at);
    }
  }

  void shut_down() {
    if (std::exchange(stopped_, true)) return;
    if (bootstrap_) bootstrap_->stop();
    node_->stop();  // Everything in flight is answered with kCancelled; later calls are too.
    dialler_->stop();
    network_->stop();
    clock_->stop();
    store_.reset();
  }

  boost::asio::io_context& io_;
  std::shared_ptr<AsioClock> clock_;
  IdentitySigner signer_;
  ServiceOptions options_;
  std::shared_ptr<UdpNetwork> network_;
  std::unique_ptr<RecordStore> store_;
  std::shared_ptr<TcpDialler> dialler_;
  std::unique_ptr<Node> node_;
  std::unique_ptr<ExpertDirectory> directory_;
  std::shared_ptr<Bootstrap> bootstrap_;
  std::uint16_t port_ = 0;
  std::atomic<bool> running_{false};  // The strand has run.
  bool stopped_ = false;              // On the strand.
  bool stop_called_ = false;          // By the owner.
};

Service::Service(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

Service::~Service() { stop(); }

Result<std::unique_ptr<Service>> Service::start(boost::asio::io_context& io, net::Identity identity,
                                                ServiceOptions options) {
  auto impl = std::make_shared<Impl>(io, std::move(identity), std::move(options));
  if (auto started = impl->start(); !started.has_value()) return started.error();
  return std::unique_ptr<Service>(new Service(std::move(impl)));
}

void Service::join(std::function<void(Result<void>)> handler) { impl_->join(std::move(handler)); }
std::uint16_t Service::port() const noexcept { return impl_->port(); }
ExpertDirectory& Service::directory() noexcept { return impl_->directory(); }
Node& Service::node() noexcept { return impl_->node(); }
void Service::stats(std::function<void(ServiceStats)> handler) { impl_->stats(std::move(handler)); }
void Service::test_dial(std::uint16_t port, std::function<void(DialReport)> handler) {
  impl_->test_dial(port, std::move(handler));
}
void Service::stop() { impl_->stop(); }

}  // namespace dmoe::dht
