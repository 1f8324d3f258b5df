#include "dmoe/client.hpp"

#include "dmoe/client_impl.hpp"

#include <algorithm>
#include <future>

namespace dmoe {
namespace {

using Clock = std::chrono::steady_clock;
using Listings = std::vector<Result<dht::PrefixListing>>;

/// Asks and waits. The resolver answers by the deadline: that is its contract.
Listings ask(dht::PrefixResolver& resolver, std::vector<ExpertPrefix> prefixes, Clock::time_point deadline) {
  auto answer = std::make_shared<std::promise<Listings>>();
  auto future = answer->get_future();
  resolver.list(std::move(prefixes), deadline, [answer](Listings listings) { answer->set_value(std::move(listings)); });
  return future.get();
}

std::vector<ExpertPrefix> below(const ExpertPrefix& prefix, const dht::PrefixListing& listing) {
  std::vector<ExpertPrefix> prefixes;
  for (const auto& child : listing.children) {
    prefixes.push_back(prefix);
    prefixes.back().coordinates.push_back(child.coordinate);
  }
  return prefixes;
}

void add_experts(const ExpertPrefix& prefix, const dht::PrefixListing& listing, ExpertMap& experts) {
  for (const auto& child : listing.children) {
    ExpertUid uid{prefix.grid, prefix.coordinates};
    uid.coordinates.push_back(child.coordinate);
    experts[std::move(uid)] = child.servers;
  }
}

}  // namespace

ClientOptions& ClientOptions::initial_peers(std::vector<std::string> peers) {
  peer_texts_ = std::move(peers);
  peers_.clear();
  return *this;
}

ClientOptions& ClientOptions::initial_endpoints(std::vector<net::Endpoint> peers) {
  peers_ = std::move(peers);
  peer_texts_.clear();
  return *this;
}

ClientOptions& ClientOptions::identity(net::Identity identity) {
  identity_ = std::move(identity);
  return *this;
}

ClientOptions& ClientOptions::join_timeout(std::chrono::milliseconds timeout) {
  join_timeout_ = timeout;
  return *this;
}

ClientOptions& ClientOptions::connect_timeout(std::chrono::milliseconds timeout) {
  connect_timeout_ = timeout;
  return *this;
}

ClientOptions& ClientOptions::ban_time(std::chrono::milliseconds time) {
  ban_time_ = time;
  return *this;
}

ClientOptions& ClientOptions::directory_ttl(std::chrono::milliseconds ttl) {
  directory_ttl_ = ttl;
  return *this;
}

ClientOptions& ClientOptions::max_frame_bytes(std::size_t bytes) {
  max_frame_bytes_ = bytes;
  return *this;
}

ClientOptions& ClientOptions::trace_file(std::filesystem::path file, std::uint64_t max_bytes) {
  trace_file_ = std::move(file);
  max_trace_bytes_ = max_bytes;
  return *this;
}

Result<std::unique_ptr<Client::Impl>> Client::Impl::create(const ClientOptions& options) {
  std::shared_ptr<net::TraceFile> trace;
  if (!options.trace_file_.empty()) {
    auto created = net::TraceFile::create({options.trace_file_, "trainer", options.max_trace_bytes_});
    if (created.has_error()) return created.error();
    trace = std::move(*created);
  }
  return std::unique_ptr<Impl>(new Impl(options, std::move(trace)));
}

Client::Impl::Impl(const ClientOptions& options, std::shared_ptr<net::TraceFile> trace)
    : trace_(std::move(trace)),
      max_frame_bytes_(options.max_frame_bytes_),
      directory_ttl_(options.directory_ttl_),
      work_(io_.get_executor()),
      rpc_(io_.get_executor(),
           [&options] {
             net::RpcClientOptions rpc;
             rpc.max_frame_bytes = options.max_frame_bytes_;
             rpc.connect_timeout = options.connect_timeout_;
             return rpc;
           }()),
      health_(io_, rpc_, std::make_shared<gating::BanList>(options.ban_time_)),
      formats_(rpc_),
      thread_([this] { io_.run(); }) {}

Client::Impl::~Impl() {
  rpc_.stop();
  if (stop_directory_) stop_directory_();
  work_.reset();
  io_.stop();
  thread_.join();
}

void Client::Impl::use_directory(std::shared_ptr<dht::PrefixResolver> resolver, std::function<void()> stop) {
  resolver_ = std::move(resolver);
  stop_directory_ = std::move(stop);
}

std::shared_ptr<gating::BeamSearch> Client::Impl::beam_search(const std::string& grid,
                                                              const std::vector<std::size_t>& grid_size) {
  gating::BeamSearchOptions options;
  options.cache.ttl = directory_ttl_;
  const std::lock_guard lock(mutex_);
  auto& search = searches_[{grid, grid_size}];
  if (!search) search = std::make_shared<gating::BeamSearch>(resolver_, grid, grid_size, options, health_.bans());
  return search;
}

Client::Client(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Client::~Client() = default;

std::shared_ptr<Client> Client::with_resolver(std::shared_ptr<dht::PrefixResolver> resolver, ClientOptions options) {
  auto impl = Impl::create(options);
  if (impl.has_error()) throw Exception(impl.error());
  (*impl)->use_directory(std::move(resolver), {});
  return std::shared_ptr<Client>(new Client(std::move(*impl)));
}

ExpertMap Client::list_experts(const std::string& grid, std::size_t dimensions, std::chrono::milliseconds timeout) {
  if (!is_grid_name(grid) || dimensions == 0 || dimensions > kMaxGridDimensions) {
    throw Exception({Errc::kInvalidArgument,
                     "'" + grid + "' with " + std::to_string(dimensions) +
                         " dimensions is not a grid; write a name such as ffn and 1 to " +
                         std::to_string(kMaxGridDimensions) + " dimensions",
                     {}});
  }
  const auto deadline = Clock::now() + timeout;
  std::vector<ExpertPrefix> prefixes{{grid, {}}};
  ExpertMap experts;
  for (std::size_t depth = 1; depth <= dimensions && !prefixes.empty(); ++depth) {
    const auto listings = ask(impl_->resolver(), prefixes, deadline);
    std::vector<ExpertPrefix> next;
    for (std::size_t i = 0; i < listings.size(); ++i) {
      if (listings[i].has_error()) throw Exception(listings[i].error());
      if (depth == dimensions) {
        add_experts(prefixes[i], *listings[i], experts);
      } else {
        const auto children = below(prefixes[i], *listings[i]);
        next.insert(next.end(), children.begin(), children.end());
      }
    }
    prefixes = std::move(next);
  }
  return experts;
}

std::vector<std::shared_ptr<const dht::ServerAddress>> Client::resolve(const ExpertUid& uid,
                                                                       std::chrono::milliseconds timeout) {
  const auto listings = ask(impl_->resolver(), {uid.parent()}, Clock::now() + timeout);
  if (listings.front().has_error()) throw Exception(listings.front().error());
  const auto& children = listings.front()->children;
  const auto it = std::find_if(children.begin(), children.end(),
                               [&](const auto& child) { return child.coordinate == uid.coordinates.back(); });
  return it == children.end() ? std::vector<std::shared_ptr<const dht::ServerAddress>>{} : it->servers;
}

net::RpcClient& Client::rpc() noexcept { return impl_->rpc(); }
std::size_t Client::max_frame_bytes() const noexcept { return impl_->max_frame_bytes(); }
UsualTimes& Client::usual_times(bool backward) noexcept { return impl_->usual_times(backward); }
ServerHealth& Client::health() noexcept { return impl_->health(); }
ServerFormats& Client::formats() noexcept { return impl_->formats(); }
HedgeBudget& Client::hedge_budget() noexcept { return impl_->hedge_budget(); }
net::TraceFile* Client::trace() noexcept { return impl_->trace(); }

std::shared_ptr<gating::BeamSearch> Client::beam_search(const std::string& grid,
                                                        const std::vector<std::size_t>& grid_size) {
  return impl_->beam_search(grid, grid_size);
}

}  // namespace dmoe
