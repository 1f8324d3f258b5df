// A network of DHT nodes as a discrete-event simulation: one seed, one result.
#pragma once

#include "dht/environment.hpp"
#include "dht/memory_store.hpp"
#include "dht/node.hpp"

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <queue>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

namespace dmoe::sim {

using dht::Address;
using dht::Duration;
using dht::TimePoint;

/// How the simulated internet treats datagrams.
struct NetworkModel {
  double median_one_way_ms = 40;  ///< Median over pairs of hosts: 80 ms there and back.
  double pair_sigma = 0.5;        ///< Log-normal over pairs: continents.
  double jitter_sigma = 0.15;     ///< Log-normal over datagrams of a pair: queues. It also reorders.
  double loss = 0;                ///< Share of datagrams lost, each way.
  double duplication = 0;         ///< Share delivered twice.
};

class World;

/// Signs with a keyed hash instead of Ed25519: ten thousand nodes sign and verify on one core. Anybody could forge it;
/// the liars of the simulation do not.
class CheapSigner final : public dht::Signer {
 public:
  explicit CheapSigner(std::uint64_t seed);
  const net::PublicKey& public_key() const override { return key_; }
  net::Signature sign(net::Bytes message) const override;
  bool verify(const net::PublicKey& key, net::Bytes message, const net::Signature& signature) const override;

 private:
  net::PublicKey key_;
};

/// A machine: an address, a clock, and what runs on it.
class Host final : public dht::Clock, public dht::DatagramNetwork, public dht::Dialler {
 public:
  Host(World& world, std::size_t index, Address address);

  TimePoint now() const override;
  std::uint64_t wall_millis() const override;
  dht::TimerId schedule(TimePoint when, std::function<void()> action) override;
  void cancel(dht::TimerId timer) override;
  void post(std::function<void()> action) override;
  bool on_strand() const override;
  void send(const Address& destination, std::span<const std::uint8_t> datagram) override;
  void on_receive(Receiver receiver) override { receiver_ = std::move(receiver); }
  void dial(const Address& to, std::function<void(bool)> done) override;

  /// Starts a DHT node here.
  dht::Node& start_node(dht::NodeOptions options = {});
  /// Ends it as a killed process does: nothing is told to anybody.
  void kill();
  dht::Node& node() { return *node_; }
  bool runs() const { return node_ != nullptr; }
  dht::RandomSource random_source();
  dht::RecordStore& store() { return *store_; }
  const CheapSigner& signer() const { return *signer_; }

  const std::size_t index;
  Address address;
  bool cut_off = false;     ///< Nothing goes in or out.
  int island = 0;           ///< Only hosts of the same island reach each other.
  bool behind_nat = false;  ///< Datagrams come in only from where some went out in the last two minutes.
  bool takes_tcp = false;   ///< Somebody listens for TCP at the own address and port, and no firewall is before it.
  std::size_t dialled = 0;  ///< TCP connections that others tried to open here.
  std::chrono::milliseconds wall_skew{0};
  std::uint64_t sent = 0;
  std::uint64_t arrived = 0;  ///< Datagrams sent to this address that were not lost, listened to or not.

 private:
  friend class World;
  World& world_;
  Receiver receiver_;
  std::unordered_map<Address, TimePoint> holes_;  // Behind NAT: whom it wrote to, and when.
  std::unique_ptr<CheapSigner> signer_;
  std::unique_ptr<dht::RecordStore> store_;
  std::unique_ptr<dht::Node> node_;
};

/// Hosts, time and everything under way between them.
class World {
 public:
  explicit World(std::uint64_t seed, NetworkModel model = {});
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  /// A host with an address in a /24 of its own (or the one given), and a key of its own (or the one given).
  Host& add_host(std::optional<Address> address = {}, std::optional<CheapSigner> signer = {});
  Host& host(std::size_t index) { return *hosts_[index]; }
  std::size_t size() const { return hosts_.size(); }

  /// Hosts with nodes, joined through random earlier ones at intervals of `spacing`, then `settle` of quiet time.
  void grow(std::size_t nodes, Duration spacing = std::chrono::milliseconds{20},
            Duration settle = std::chrono::seconds{30}, dht::NodeOptions options = {});

  TimePoint now() const { return now_; }
  void run_for(Duration time);
  /// Until `done` says so; false when `limit` passed before.
  bool run_until(const std::function<bool()>& done, Duration limit = std::chrono::seconds{60});
  std::uint64_t random() { return random_(); }
  double uniform() { return static_cast<double>(random_() >> 11U) * 0x1.0p-53; }

  NetworkModel model;
  std::uint64_t datagrams = 0;  ///< Sent so far, by everybody.
  /// What the round trip between two hosts takes before jitter.
  Duration base_round_trip(const Address& a, const Address& b) const;

  /// Blocking forms for tests: they run the world until the answer is there.
  Result<dht::FindResult> find(Host& from, const dht::Key& key, dht::FindOptions options = {});
  std::vector<Result<dht::FindResult>> find_many(Host& from, std::vector<dht::Key> keys, dht::FindOptions options = {});
  Result<dht::StoreReport> store(Host& from, dht::StoreRequest request);
  std::vector<Result<dht::StoreReport>> store_many(Host& from, std::vector<dht::StoreRequest> requests);

 private:
  friend class Host;
  /// Something to happen: an action (a timer or posted work) or a datagram that arrives, by its place in the pool.
  struct Event {
    TimePoint when;
    std::uint64_t order;
    std::uint32_t host;
    std::uint32_t place;
    std::uint32_t generation;
    bool is_datagram;
    friend bool operator>(const Event& a, const Event& b) {
      return a.when != b.when ? a.when > b.when : a.order > b.order;
    }
  };
  struct Action {
    std::function<void()> run;
    std::uint32_t generation = 0;  // Raised when the place is used anew: a timer that ran cannot cancel its successor.
  };
  struct Datagram {
    std::uint32_t source = 0;  // The sending host.
    std::uint16_t size = 0;
    std::array<std::uint8_t, dht::kMaxDatagram> bytes;
  };

  dht::TimerId at(TimePoint when, std::size_t host, std::function<void()> action);
  void transmit(Host& from, const Address& to, std::span<const std::uint8_t> bytes);
  void deliver(std::size_t to, const Datagram& datagram);
  void connect(Host& from, const Address& to, std::function<void(bool)> done);
  void cancel(dht::TimerId timer);
  std::function<void()> take_action(std::uint32_t place);
  Duration one_way(const Address& from, const Address& to);
  double normal();
  void step();

  std::mt19937_64 random_;
  std::uint64_t seed_;
  TimePoint now_;
  std::uint64_t next_ = 0;
  std::vector<std::unique_ptr<Host>> hosts_;
  std::unordered_map<Address, std::size_t> by_address_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::vector<Action> actions_;
  std::vector<std::uint32_t> free_actions_;
  std::deque<Datagram> under_way_;
  std::vector<std::uint32_t> free_datagrams_;
  std::optional<std::size_t> running_;
};

}  // namespace dmoe::sim
