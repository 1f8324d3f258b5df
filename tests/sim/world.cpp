#include "tests/sim/world.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>
#include <utility>

namespace dmoe::sim {
namespace {

constexpr std::chrono::minutes kNatHole{2};
constexpr std::uint64_t kWallStart = 1'800'000'000'000;  // Milliseconds since 1970, somewhere in 2027.

std::uint64_t mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27U)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31U);
}

std::uint64_t hash_of(std::uint64_t seed, net::Bytes bytes) {
  std::uint64_t hash = mix(seed ^ bytes.size());
  for (std::size_t i = 0; i < bytes.size(); i += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + i, std::min<std::size_t>(8, bytes.size() - i));
    hash = mix(hash ^ word);
  }
  return hash;
}

/// Two draws in (0, 1) to one standard normal (Box and Muller): the standard library's own differs between versions.
double box_muller(double u, double v) { return std::sqrt(-2 * std::log(1 - u)) * std::cos(2 * std::numbers::pi * v); }

double to_unit(std::uint64_t word) { return static_cast<double>(word >> 11U) * 0x1.0p-53; }

Duration milliseconds(double ms) {
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double, std::milli>(ms));
}

}  // namespace

CheapSigner::CheapSigner(std::uint64_t seed) {
  for (std::size_t i = 0; i < 4; ++i) {
    const std::uint64_t word = mix(seed + i);
    std::memcpy(key_.data() + i * 8, &word, 8);
    seed = word;
  }
}

net::Signature CheapSigner::sign(net::Bytes message) const {
  net::Signature signature{};
  const std::uint64_t hash = hash_of(hash_of(1, key_), message);
  std::memcpy(signature.data(), &hash, 8);
  return signature;
}

bool CheapSigner::verify(const net::PublicKey& key, net::Bytes message, const net::Signature& signature) const {
  std::uint64_t given = 0;
  std::memcpy(&given, signature.data(), 8);
  return given == hash_of(hash_of(1, key), message);
}

Host::Host(World& world, std::size_t index_in, Address address_in)
    : index(index_in),
      address(address_in),
      world_(world),
      signer_(std::make_unique<CheapSigner>(mix(world.seed_) ^ mix(index_in))),
      store_(std::make_unique<dht::MemoryStore>()) {}

TimePoint Host::now() const { return world_.now_; }

std::uint64_t Host::wall_millis() const {
  const auto since = std::chrono::duration_cast<std::chrono::milliseconds>(world_.now_.time_since_epoch());
  return kWallStart + static_cast<std::uint64_t>((since + wall_skew).count());
}

dht::TimerId Host::schedule(TimePoint when, std::function<void()> action) {
  return world_.at(std::max(when, world_.now_), index, std::move(action));
}

void Host::cancel(dht::TimerId timer) { world_.cancel(timer); }

void Host::post(std::function<void()> action) { world_.at(world_.now_, index, std::move(action)); }

bool Host::on_strand() const { return !world_.running_ || *world_.running_ == index; }

void Host::send(const Address& destination, std::span<const std::uint8_t> datagram) {
  world_.transmit(*this, destination, datagram);
}

void Host::dial(const Address& to, std::function<void(bool)> done) { world_.connect(*this, to, std::move(done)); }

dht::RandomSource Host::random_source() {
  return [generator = std::mt19937_64(mix(world_.seed_ + 77) ^ mix(index))]() mutable { return generator(); };
}

dht::Node& Host::start_node(dht::NodeOptions options) {
  node_ = std::make_unique<dht::Node>(*this, *this, random_source(), *store_, *signer_, options);
  node_->set_dialler(this);
  return *node_;
}

void Host::kill() {
  receiver_ = {};
  cut_off = true;
  node_.reset();
}

World::World(std::uint64_t seed, NetworkModel model_in)
    : model(model_in), random_(seed), seed_(seed), now_(std::chrono::hours{1}) {}

World::~World() {
  for (auto& host : hosts_) host->node_.reset();
}

Host& World::add_host(std::optional<Address> address, std::optional<CheapSigner> signer) {
  const std::size_t index = hosts_.size();
  // Spread over the address space: 11.0.0.0 upwards, each in a /24 of its own.
  const auto ip = static_cast<std::uint32_t>(0x0B000001U + (index << 8U));
  const Address own = address.value_or(Address::v4(ip, 4040));
  hosts_.push_back(std::make_unique<Host>(*this, index, own));
  by_address_[own] = index;
  if (signer) hosts_.back()->signer_ = std::make_unique<CheapSigner>(*signer);
  return *hosts_.back();
}

void World::grow(std::size_t nodes, Duration spacing, Duration settle, dht::NodeOptions options) {
  for (std::size_t i = 0; i < nodes; ++i) {
    Host& host = add_host();
    host.start_node(options);
    std::vector<Address> peers;
    for (int k = 0; k < 3 && host.index != 0; ++k) {
      Host& other = this->host(random_() % host.index);
      if (other.runs() && !other.behind_nat) peers.push_back(other.address);
    }
    host.node().bootstrap(std::move(peers), {}, {});
    run_for(spacing);
  }
  run_for(settle);
}

double World::normal() {
  const double u = uniform();
  return box_muller(u, uniform());
}

Duration World::base_round_trip(const Address& a, const Address& b) const {
  // The same for a pair in both directions, without a table: drawn from a hash of both.
  const std::hash<Address> hash;
  const std::uint64_t pair = mix(seed_ ^ (hash(a) + hash(b)));
  const double factor = std::exp(model.pair_sigma * box_muller(to_unit(mix(pair)), to_unit(mix(pair + 1))));
  return milliseconds(2 * model.median_one_way_ms * factor);
}

Duration World::one_way(const Address& from, const Address& to) {
  const double base = std::chrono::duration<double, std::milli>(base_round_trip(from, to)).count() / 2;
  return milliseconds(base * std::exp(model.jitter_sigma * normal()));
}

void World::transmit(Host& from, const Address& to, std::span<const std::uint8_t> bytes) {
  ++datagrams;
  ++from.sent;
  if (from.behind_nat) from.holes_[to] = now_;
  const auto found = by_address_.find(to);
  if (from.cut_off || found == by_address_.end()) return;
  if (uniform() < model.loss) return;
  const int copies = uniform() < model.duplication ? 2 : 1;
  for (int i = 0; i < copies; ++i) {
    if (free_datagrams_.empty()) {
      free_datagrams_.push_back(static_cast<std::uint32_t>(under_way_.size()));
      under_way_.emplace_back();
    }
    const std::uint32_t place = free_datagrams_.back();
    free_datagrams_.pop_back();
    Datagram& datagram = under_way_[place];
    datagram.source = static_cast<std::uint32_t>(from.index);
    datagram.size = static_cast<std::uint16_t>(std::min(bytes.size(), datagram.bytes.size()));
    std::copy_n(bytes.begin(), datagram.size, datagram.bytes.begin());
    events_.push(
        {now_ + one_way(from.address, to), ++next_, static_cast<std::uint32_t>(found->second), place, 0, true});
  }
}

void World::deliver(std::size_t to, const Datagram& datagram) {
  Host& host = *hosts_[to];
  const Host& source = *hosts_[datagram.source];
  if (host.cut_off || source.island != host.island) return;
  ++host.arrived;
  if (!host.receiver_) return;
  if (host.behind_nat) {
    const auto hole = host.holes_.find(source.address);
    if (hole == host.holes_.end() || now_ - hole->second > kNatHole) return;
  }
  host.receiver_(source.address, {datagram.bytes.data(), datagram.size});
}

/// There and back, or the dialler's whole patience where nobody answers.
void World::connect(Host& from, const Address& to, std::function<void(bool)> done) {
  const auto found = by_address_.find(to);
  Host* host = found == by_address_.end() ? nullptr : hosts_[found->second].get();
  if (host != nullptr) ++host->dialled;
  const bool there =
      host != nullptr && host->takes_tcp && !host->cut_off && !from.cut_off && host->island == from.island;
  const Duration takes = there ? base_round_trip(from.address, to) : dht::kDialLimit;
  at(now_ + takes, from.index, [done = std::move(done), there] { done(there); });
}

dht::TimerId World::at(TimePoint when, std::size_t host, std::function<void()> action) {
  if (free_actions_.empty()) {
    free_actions_.push_back(static_cast<std::uint32_t>(actions_.size()));
    actions_.emplace_back();
  }
  const std::uint32_t place = free_actions_.back();
  free_actions_.pop_back();
  Action& entry = actions_[place];
  entry.run = std::move(action);
  events_.push({when, ++next_, static_cast<std::uint32_t>(host), place, entry.generation, false});
  return std::uint64_t{entry.generation} << 32U | place;
}

std::function<void()> World::take_action(std::uint32_t place) {
  ++actions_[place].generation;
  free_actions_.push_back(place);
  return std::exchange(actions_[place].run, {});
}

/// The event stays in the queue and finds its action gone.
void World::cancel(dht::TimerId timer) {
  const auto place = static_cast<std::uint32_t>(timer);
  if (place < actions_.size() && actions_[place].generation == static_cast<std::uint32_t>(timer >> 32U)) {
    take_action(place);
  }
}

void World::step() {
  const Event event = events_.top();
  events_.pop();
  now_ = event.when;
  running_ = event.host;
  if (event.is_datagram) {
    deliver(event.host, under_way_[event.place]);  // A deque: what is sent meanwhile does not move it.
    free_datagrams_.push_back(event.place);
  } else if (actions_[event.place].generation == event.generation) {
    take_action(event.place)();
  }
  running_.reset();
}

void World::run_for(Duration time) {
  const TimePoint until = now_ + time;
  while (!events_.empty() && events_.top().when <= until) step();
  now_ = until;
}

bool World::run_until(const std::function<bool()>& done, Duration limit) {
  const TimePoint until = now_ + limit;
  while (!done()) {
    if (events_.empty() || events_.top().when > until) {
      now_ = until;
      return done();
    }
    step();
  }
  return true;
}

std::vector<Result<dht::FindResult>> World::find_many(Host& from, std::vector<dht::Key> keys,
                                                      dht::FindOptions options) {
  std::optional<std::vector<Result<dht::FindResult>>> results;
  from.node().find_many(std::move(keys), options, [&](auto found) { results = std::move(found); });
  run_until([&] { return results.has_value(); });
  return std::move(results).value();
}

Result<dht::FindResult> World::find(Host& from, const dht::Key& key, dht::FindOptions options) {
  return find_many(from, {key}, options).front();
}

std::vector<Result<dht::StoreReport>> World::store_many(Host& from, std::vector<dht::StoreRequest> requests) {
  std::optional<std::vector<Result<dht::StoreReport>>> results;
  from.node().store_many(std::move(requests), [&](auto stored) { results = std::move(stored); });
  run_until([&] { return results.has_value(); });
  return std::move(results).value();
}

Result<dht::StoreReport> World::store(Host& from, dht::StoreRequest request) {
  return store_many(from, {std::move(request)}).front();
}

}  // namespace dmoe::sim
