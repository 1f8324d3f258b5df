#include "dht/expert_directory.hpp"

#include "dht/listing.hpp"
#include "dht/node.hpp"
#include "dht/routing_table.hpp"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

namespace dmoe::dht {
namespace {

/// Holders whose listings are merged: all. Each server's record lies on the nodes that were nearest when it announced,
/// so while a network forms (and nodes join between two heartbeats) no single holder knows every server.
constexpr std::size_t kQuorum = kReplication;
/// But the last of eight answers takes three times as long as the fourth: whoever is later than these and a quarter
/// of a round trip is not waited for. Only a server that none of the holders in time knows can be missed, until the
/// next listing.
constexpr std::size_t kEnough = kReplication / 2;

Key key_of(const ExpertPrefix& prefix) { return Key::of("dmoe-expert-prefix:" + to_string(prefix)); }

using Address = std::shared_ptr<const ServerAddress>;
using Hosts = std::vector<Address>;
using Children = std::map<ExpertPrefix, std::set<Coordinate>>;

/// Every prefix of every UID, with what lies directly below it.
Children children_of(const std::vector<ExpertUid>& uids) {
  Children children;
  for (const ExpertUid& uid : uids) {
    ExpertPrefix prefix{uid.grid, {}};
    for (const Coordinate coordinate : uid.coordinates) {
      children[prefix].insert(coordinate);
      prefix.coordinates.push_back(coordinate);
    }
  }
  return children;
}

/// Only what a server says about itself counts: its record carries no subkey of its own choosing.
PrefixListing listing_of(const FindResult& found, TimePoint now) {
  std::map<Coordinate, Hosts> children;
  PrefixListing result;
  result.expires = TimePoint::max();
  for (const LiveRecord& live : found.records) {
    if (!live.record.subkey.empty()) continue;
    auto listing = read_listing(live.record.value);
    if (!listing.has_value()) continue;
    const auto server = std::make_shared<const ServerAddress>(
        ServerAddress{net::peer_id_of(live.record.publisher), std::move(listing->endpoints), live.record.sequence});
    for (const Coordinate coordinate : listing->children) children[coordinate].push_back(server);
    result.expires = std::min(result.expires, live.deadline);
  }
  for (auto& [coordinate, servers] : children) {
    std::sort(servers.begin(), servers.end(), [](const auto& a, const auto& b) { return a->peer < b->peer; });
    result.children.push_back({coordinate, std::move(servers)});
  }
  if (result.children.empty()) result.expires = now;
  return result;
}

}  // namespace

class ExpertDirectory::Impl : public std::enable_shared_from_this<Impl> {
 public:
  explicit Impl(Node& node) : node_(node) {}

  /// Runs on the node's strand, in order; at once when the caller is there.
  void run(std::function<void()> action) {
    if (node_.clock().on_strand()) return action();
    node_.clock().post([self = shared_from_this(), action = std::move(action)] {
      if (!self->closed_) action();
    });
  }
  void close() { closed_ = true; }

  void announce(const std::vector<ExpertUid>& uids, std::vector<net::Endpoint> endpoints, std::chrono::milliseconds ttl,
                std::function<void(Result<AnnounceReport>)> handler) {
    std::vector<StoreRequest> requests;
    std::set<ExpertPrefix> touched;
    Listing listing{std::move(endpoints), {}};
    for (const auto& [prefix, coordinates] : children_of(uids)) {
      listing.children.assign(coordinates.begin(), coordinates.end());
      auto value = write_listing(listing);
      if (!value.has_value()) return fail(std::move(handler), value.error());
      requests.push_back({key_of(prefix), {}, std::move(*value), ttl, false});
      touched.insert(prefix);
    }
    for (const ExpertPrefix& prefix : announced_) {
      if (!touched.contains(prefix)) requests.push_back({key_of(prefix), {}, {}, std::max(ttl, ttl_), true});
    }
    announced_ = std::move(touched);
    ttl_ = ttl;
    publish(std::move(requests), std::move(handler));
  }

  void withdraw_all(std::function<void(Result<AnnounceReport>)> handler) {
    std::vector<StoreRequest> requests;
    for (const ExpertPrefix& prefix : std::exchange(announced_, {})) {
      requests.push_back({key_of(prefix), {}, {}, ttl_, true});
    }
    publish(std::move(requests), std::move(handler));
  }

  void list(const std::vector<ExpertPrefix>& prefixes, TimePoint deadline, Handler handler) {
    std::vector<Key> keys;
    for (const ExpertPrefix& prefix : prefixes) keys.push_back(key_of(prefix));
    FindOptions options;
    options.quorum = kQuorum;
    options.enough = kEnough;
    options.allow_cached = false;  // A copy on the path knows nothing of tombstones.
    options.deadline = deadline;
    node_.find_many(std::move(keys), options,
                    [self = shared_from_this(), handler = std::move(handler)](std::vector<Result<FindResult>> found) {
                      std::vector<Result<PrefixListing>> listings;
                      const TimePoint now = self->node_.clock().now();
                      for (const auto& result : found) {
                        if (result.has_value()) {
                          listings.emplace_back(listing_of(*result, now));
                        } else {
                          listings.emplace_back(result.error());
                        }
                      }
                      handler(std::move(listings));
                    });
  }

 private:
  void fail(std::function<void(Result<AnnounceReport>)> handler, const Error& error) {
    node_.clock().post([handler = std::move(handler), error] { handler(error); });
  }

  void publish(std::vector<StoreRequest> requests, std::function<void(Result<AnnounceReport>)> handler) {
    node_.store_many(std::move(requests), [handler = std::move(handler)](std::vector<Result<StoreReport>> results) {
      AnnounceReport report;
      report.records = results.size();
      report.replicas_least = results.empty() ? 0 : SIZE_MAX;
      std::optional<Error> refused;
      for (const auto& result : results) {
        if (!result.has_value()) refused = result.error();
        report.stored += result.has_value() ? 1 : 0;
        report.replicas_least = std::min(report.replicas_least, result.has_value() ? result->replicas : 0);
      }
      if (report.stored == 0 && refused) return handler(*refused);
      handler(report);
    });
  }

  Node& node_;
  bool closed_ = false;  // On the strand only, as everything below.
  std::set<ExpertPrefix> announced_;
  std::chrono::milliseconds ttl_{kAnnouncementTtl};
};

ExpertDirectory::ExpertDirectory(Node& node) : impl_(std::make_shared<Impl>(node)) {}

ExpertDirectory::~ExpertDirectory() { impl_->close(); }

void ExpertDirectory::announce(std::vector<ExpertUid> uids, std::vector<net::Endpoint> endpoints,
                               std::chrono::milliseconds ttl, std::function<void(Result<AnnounceReport>)> handler) {
  impl_->run([impl = impl_, uids = std::move(uids), endpoints = std::move(endpoints), ttl,
              handler = std::move(handler)]() mutable {
    impl->announce(uids, std::move(endpoints), ttl, std::move(handler));
  });
}

void ExpertDirectory::withdraw_all(std::function<void(Result<AnnounceReport>)> handler) {
  impl_->run([impl = impl_, handler = std::move(handler)]() mutable { impl->withdraw_all(std::move(handler)); });
}

void ExpertDirectory::list(std::vector<ExpertPrefix> prefixes, std::chrono::steady_clock::time_point deadline,
                           Handler handler) {
  impl_->run([impl = impl_, prefixes = std::move(prefixes), deadline, handler = std::move(handler)]() mutable {
    impl->list(prefixes, deadline, std::move(handler));
  });
}

void ExpertDirectory::resolve(std::vector<ExpertUid> uids, std::chrono::steady_clock::time_point deadline,
                              std::function<void(Result<std::vector<Hosts>>)> handler) {
  std::map<ExpertPrefix, std::size_t> place;
  std::vector<ExpertPrefix> parents;
  for (const ExpertUid& uid : uids) {
    const auto [entry, fresh] = place.try_emplace(uid.parent(), parents.size());
    if (fresh) parents.push_back(entry->first);
  }
  list(std::move(parents), deadline,
       [uids = std::move(uids), place = std::move(place), handler = std::move(handler)](auto listings) {
         std::vector<Hosts> hosts;
         for (const ExpertUid& uid : uids) {
           const auto& listing = listings[place.at(uid.parent())];
           if (!listing.has_value()) return handler(listing.error());
           const auto child = std::find_if(listing->children.begin(), listing->children.end(),
                                           [&](const auto& c) { return c.coordinate == uid.coordinates.back(); });
           hosts.push_back(child == listing->children.end() ? Hosts{} : child->servers);
         }
         handler(std::move(hosts));
       });
}

namespace {

/// One level of a grid after the other, each with one shared walk.
struct GridWalk : std::enable_shared_from_this<GridWalk> {
  using Found = std::map<ExpertUid, Hosts>;

  ExpertDirectory& directory;
  std::size_t dimensions;
  TimePoint deadline;
  std::function<void(Result<Found>)> handler;

  GridWalk(ExpertDirectory& directory_in, std::size_t dimensions_in, TimePoint deadline_in,
           std::function<void(Result<Found>)> handler_in)
      : directory(directory_in), dimensions(dimensions_in), deadline(deadline_in), handler(std::move(handler_in)) {}

  void step(const std::vector<ExpertPrefix>& level) {
    if (level.empty()) return handler(Found{});
    directory.list(level, deadline, [self = shared_from_this(), level](std::vector<Result<PrefixListing>> listings) {
      self->take(level, listings);
    });
  }

  void take(const std::vector<ExpertPrefix>& level, const std::vector<Result<PrefixListing>>& listings) {
    const bool last = level.front().coordinates.size() + 1 == dimensions;
    std::vector<ExpertPrefix> next;
    Found found;
    for (std::size_t i = 0; i < level.size(); ++i) {
      if (!listings[i].has_value()) return handler(listings[i].error());
      for (const PrefixListing::Child& child : listings[i]->children) {
        std::vector<Coordinate> coordinates = level[i].coordinates;
        coordinates.push_back(child.coordinate);
        if (last) {
          found[ExpertUid{level[i].grid, std::move(coordinates)}] = child.servers;
        } else {
          next.push_back({level[i].grid, std::move(coordinates)});
        }
      }
    }
    if (last) return handler(std::move(found));
    step(next);
  }
};

}  // namespace

void ExpertDirectory::list_grid(std::string grid, std::size_t dimensions,
                                std::chrono::steady_clock::time_point deadline,
                                std::function<void(Result<std::map<ExpertUid, Hosts>>)> handler) {
  if (dimensions == 0 || dimensions > kMaxGridDimensions) {
    return handler(Error{
        Errc::kInvalidArgument,
        "a grid has 1 to " + std::to_string(kMaxGridDimensions) + " dimensions, not " + std::to_string(dimensions),
        {}});
  }
  std::make_shared<GridWalk>(*this, dimensions, deadline, std::move(handler))->step({{std::move(grid), {}}});
}

}  // namespace dmoe::dht
