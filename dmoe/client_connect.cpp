// Client over a DHT node of its own.
#include "dmoe/client.hpp"
#include "dmoe/client_impl.hpp"

#include "dht/service.hpp"

#include <future>

namespace dmoe {
namespace {

/// The DHT node's directory; keeps the node alive as long as somebody may ask.
class JoinedDirectory final : public dht::PrefixResolver {
 public:
  explicit JoinedDirectory(std::unique_ptr<dht::Service> service) : service_(std::move(service)) {}

  void list(std::vector<ExpertPrefix> prefixes, std::chrono::steady_clock::time_point deadline,
            Handler handler) override {
    service_->directory().list(std::move(prefixes), deadline, std::move(handler));
  }

  Result<void> join() {
    auto joined = std::make_shared<std::promise<Result<void>>>();
    auto result = joined->get_future();
    service_->join([joined](Result<void> outcome) { joined->set_value(std::move(outcome)); });
    return result.get();
  }

  void stop() { service_->stop(); }

 private:
  std::unique_ptr<dht::Service> service_;
};

Result<std::vector<net::Endpoint>> parse_peers(const std::vector<std::string>& texts) {
  std::vector<net::Endpoint> peers;
  for (const auto& text : texts) {
    auto peer = net::parse_endpoint(text);
    if (peer.has_error()) return peer.error();
    peers.push_back(std::move(*peer));
  }
  return peers;
}

}  // namespace

Result<std::shared_ptr<Client>> Client::try_connect(ClientOptions options) {
  if (!options.peer_texts_.empty()) {
    auto peers = parse_peers(options.peer_texts_);
    if (peers.has_error()) return peers.error();
    options.peers_ = std::move(*peers);
  }
  if (options.peers_.empty()) {
    return Error{Errc::kInvalidArgument,
                 "a client needs at least one initial peer: host:port of a DHT node or of an expert server",
                 {}};
  }
  auto created = Impl::create(options);
  if (created.has_error()) return created.error();
  auto impl = std::move(*created);
  dht::ServiceOptions service_options;
  service_options.initial_peers = options.peers_;
  service_options.client_only = true;
  service_options.join_timeout = options.join_timeout_;
  auto identity = options.identity_ ? *options.identity_ : net::Identity::generate();
  auto service = dht::Service::start(impl->io(), std::move(identity), std::move(service_options));
  if (service.has_error()) return service.error();
  auto directory = std::make_shared<JoinedDirectory>(std::move(*service));
  impl->use_directory(directory, [directory] { directory->stop(); });
  auto joined = directory->join();
  if (joined.has_error()) return joined.error();
  return std::shared_ptr<Client>(new Client(std::move(impl)));
}

std::shared_ptr<Client> Client::connect(ClientOptions options) {
  auto client = try_connect(std::move(options));
  if (client.has_error()) throw Exception(client.error());
  return *client;
}

}  // namespace dmoe
