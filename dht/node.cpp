#include "dht/node.hpp"

#include "dht/answerer.hpp"
#include "dht/dial_test.hpp"
#include "dht/membership.hpp"
#include "dht/node_core.hpp"
#include "dht/publisher.hpp"
#include "dht/reach.hpp"
#include "dht/replicator.hpp"

#include <algorithm>
#include <cassert>
#include <utility>

namespace dmoe::dht {
namespace {

using namespace std::chrono_literals;

constexpr Duration kTick = 1s;
constexpr Duration kSaveTable = 60s;
constexpr Duration kFirstContactWait = 5s;
constexpr Duration kCopyPause = 20ms;

}  // namespace

void NodeCore::post(std::function<void()> action) {
  clock.post([watched = std::weak_ptr<const bool>(alive), action = std::move(action)] {
    if (!watched.expired()) action();
  });
}

TimerId NodeCore::after(Duration pause, std::function<void()> action) {
  return clock.schedule(clock.now() + pause, [watched = std::weak_ptr<const bool>(alive), action = std::move(action)] {
    if (!watched.expired()) action();
  });
}

std::shared_ptr<Lookup> NodeCore::look_up(std::vector<Key> keys, LookupOptions lookup_options, Lookup::OnKey on_key,
                                          const std::vector<wire::NodeInfo>& seeds) {
  const auto own = std::make_shared<std::weak_ptr<Lookup>>();
  auto lookup = std::make_shared<Lookup>(
      Lookup::Context{requests, table, book, verifier, clock, self}, std::move(keys), lookup_options,
      [this, own, on_key = std::move(on_key)](std::size_t index, LookupOutcome outcome) {
        on_key(index, std::move(outcome));
        if (const auto finished = own->lock(); finished && finished->finished()) lookups.erase(finished);
      });
  *own = lookup;
  lookups.insert(lookup);
  lookup->start(seeds);
  return lookup;
}

Duration NodeCore::jittered(Duration around) {
  return around / 2 + Duration{static_cast<Duration::rep>(random() % static_cast<std::uint64_t>(around.count() + 1))};
}

class Node::Impl {
 public:
  Impl(DatagramNetwork& network, Clock& clock, RandomSource random, RecordStore& store, const Signer& signer,
       NodeOptions options)
      : core_(network, clock, std::move(random), store, signer, options, request_hooks()),
        answerer_(core_, {[this](const NodeId& id, const Address& at) { membership_.on_stranger(id, at); },
                          [this](const Address& from, std::uint64_t nonce, std::uint64_t transaction) {
                            reach_test_.on_knock(from, nonce, transaction);
                          }}),
        publisher_(core_),
        replicator_(core_),
        reach_test_(core_),
        reach_watch_(core_, reach_test_, [this](Reach reach) { on_reach_verdict(reach); }),
        membership_(core_, {[this](const NodeId& id) { replicator_.on_new_contact(id); },
                            [this](std::function<void()> join) { before_joining(std::move(join)); }}) {
    membership_.restore(store.load_state());
    network.on_receive(
        [this](const Address& source, std::span<const std::uint8_t> datagram) { on_datagram(source, datagram); });
    next_save_ = clock.now() + kSaveTable;
    tick();
  }

  ~Impl() {
    for (const auto& lookup : core_.lookups) lookup->abandon();
    stop();
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void stop() {
    if (std::exchange(stopped_, true)) return;
    core_.network.on_receive({});
    save_table();
    core_.clock.cancel(tick_timer_);
    core_.requests.stop();
    const auto lookups = core_.lookups;  // Ending one takes it out of the set.
    for (const auto& lookup : lookups) lookup->end(true);
    membership_.stop();
    publisher_.stop();
  }
  bool stopped() const { return stopped_; }
  NodeCore& core() { return core_; }
  Membership& membership() { return membership_; }
  Publisher& publisher() { return publisher_; }

  void find_many(std::vector<Key> keys, FindOptions options,
                 std::function<void(std::vector<Result<FindResult>>)> handler);
  ReachTest& reach_test() { return reach_test_; }
  void set_client(bool client);
  void on_reach(std::function<void(Reach, const std::optional<Address>&)> handler) { on_reach_ = std::move(handler); }
  void save_table() {
    const auto state = membership_.save();
    if (!state.empty()) core_.store.save_state(state);
  }

 private:
  /// A find_many in progress.
  struct Finding {
    std::vector<Key> keys;
    FindOptions options;
    std::function<void(std::vector<Result<FindResult>>)> handler;
    std::vector<Result<FindResult>> results;
    std::size_t open = 0;
    TimerId timer = 0;
    bool timed = false;
    bool started = false;
  };

  Requests::Hooks request_hooks() {
    return {[this](const NodeId& id, const Address& at) { membership_.on_proven(id, at); },
            [this](const NodeId& id, const Address& at) { membership_.on_heard(id, at); },
            [this](const NodeId& id, const Address& at) { membership_.on_failed(id, at); },
            [this](const NodeId& id, const Address& at) { membership_.on_client(id, at); },
            [this](const Address& elsewhere) { membership_.on_conflict(elsewhere); }};
  }

  void on_datagram(const Address& source, std::span<const std::uint8_t> datagram);
  void tick();
  void start(const std::shared_ptr<Finding>& finding);
  FindResult own_records(const Key& key);
  void leave_copies(const std::vector<LiveRecord>& records, const wire::NodeInfo& at);
  void settle(const std::shared_ptr<Finding>& finding, std::size_t index, Result<FindResult> result);
  void before_joining(std::function<void()> join);
  void on_reach_verdict(Reach reach);

  NodeCore core_;
  Answerer answerer_;
  Publisher publisher_;
  Replicator replicator_;
  ReachTest reach_test_;
  ReachWatch reach_watch_;
  Membership membership_;
  TimerId tick_timer_ = 0;
  bool stopped_ = false;
  TimePoint next_save_;
  std::function<void(Reach, const std::optional<Address>&)> on_reach_;
};

void Node::Impl::on_datagram(const Address& source, std::span<const std::uint8_t> datagram) {
  ++core_.received;
  auto message = wire::decode(datagram);
  if (!message) {
    ++core_.refused;
    return;
  }
  if (auto* reply = std::get_if<wire::Reply>(&message->body)) {
    if (!core_.requests.on_reply(source, *message, *reply)) ++core_.refused;
  } else {
    answerer_.on_request(source, *message, datagram.size());
  }
}

void Node::Impl::tick() {
  core_.store.purge(core_.clock.now());
  core_.cache.purge(core_.clock.now());
  answerer_.expire_assemblies();
  membership_.tick();
  replicator_.tick();
  publisher_.tick();
  if (core_.clock.now() >= next_save_) {
    next_save_ = core_.clock.now() + kSaveTable;
    save_table();
  }
  tick_timer_ = core_.clock.schedule(core_.clock.now() + kTick, [this] { tick(); });
}

FindResult Node::Impl::own_records(const Key& key) {
  FindResult result;
  if (stopped_) return result;
  core_.store.visit(key, core_.clock.now(), 0, [&](const LiveRecord& live) {
    result.records.push_back(live);
    return true;
  });
  return result;
}

void Node::Impl::settle(const std::shared_ptr<Finding>& finding, std::size_t index, Result<FindResult> result) {
  if (result.has_value()) {
    const TimePoint now = core_.clock.now();
    std::erase_if(result->records,
                  [&](const LiveRecord& live) { return live.record.tombstone || live.deadline <= now; });
  }
  finding->results[index] = std::move(result);
  if (--finding->open != 0) return;
  if (finding->timed) core_.clock.cancel(finding->timer);
  core_.post([finding] { finding->handler(std::move(finding->results)); });
}

/// Ours and theirs: newest per place.
static void merge(std::vector<LiveRecord>& into, std::vector<LiveRecord> more) {
  for (LiveRecord& live : more) {
    const auto known = std::find_if(into.begin(), into.end(),
                                    [&](const LiveRecord& other) { return other.record.replaces(live.record); });
    if (known == into.end()) {
      into.push_back(std::move(live));
    } else if (known->record.sequence < live.record.sequence) {
      *known = std::move(live);
    }
  }
}

void Node::Impl::find_many(std::vector<Key> keys, FindOptions options,
                           std::function<void(std::vector<Result<FindResult>>)> handler) {
  const auto finding = std::make_shared<Finding>();
  finding->open = keys.size();
  finding->results.assign(keys.size(), Error{Errc::kInternal, "not looked up", {}});
  finding->keys = std::move(keys);
  finding->options = options;
  finding->handler = std::move(handler);
  if (finding->keys.empty()) return core_.post([finding] { finding->handler({}); });
  const bool joining = core_.table.size() == 0 && membership_.joining();
  if (!joining) return start(finding);
  const auto begin = [this, finding] {
    if (!std::exchange(finding->started, true)) start(finding);
  };
  const TimePoint latest = core_.clock.now() + kFirstContactWait;
  const TimePoint until = std::min(latest, options.deadline.value_or(latest));
  core_.after(until - core_.clock.now(), begin);
  membership_.when_contacted(begin);
}

void Node::Impl::start(const std::shared_ptr<Finding>& finding) {
  std::vector<Key> keys;
  std::vector<std::size_t> indices;
  if (stopped_) {
    for (std::size_t i = 0; i < finding->keys.size(); ++i) {
      settle(finding, i, Error{Errc::kCancelled, "the DHT node has stopped", {}});
    }
    return;
  }
  if (core_.client && core_.table.size() == 0 && core_.store.stats().records == 0) {
    for (std::size_t i = 0; i < finding->keys.size(); ++i) {
      settle(finding, i, Error{Errc::kUnavailable, "no DHT node answered yet: check the initial peers", {}});
    }
    return;
  }
  LookupOptions options;
  options.allow_cached = finding->options.allow_cached;
  options.quorum = finding->options.quorum;
  options.enough = finding->options.enough;
  for (std::size_t i = 0; i < finding->keys.size(); ++i) {
    const Key& key = finding->keys[i];
    FindResult own = own_records(key);
    // What this node holds as one of the nearest counts as one holder's answer.
    const bool holder = !own.records.empty() && core_.table.self_is_near(key.bytes);
    const bool copy_will_do = options.quorum == 1 && options.allow_cached && own.records.empty();
    if (copy_will_do) own.records = core_.cache.get(key, core_.clock.now());
    own.cached = copy_will_do && !own.records.empty();
    if ((holder && options.quorum == 1) || own.cached) {
      own.holders = 1;
      settle(finding, i, std::move(own));
    } else {
      keys.push_back(key);
      indices.push_back(i);
    }
  }
  if (keys.empty()) return;
  const auto on_key = [this, finding, indices, options](std::size_t at, LookupOutcome outcome) {
    const std::size_t index = indices[at];
    FindResult result = own_records(finding->keys[index]);
    result.holders = outcome.holders + (result.records.empty() ? 0 : 1);
    result.requests = outcome.requests;
    result.cached = outcome.cached;
    const bool may_copy = options.quorum == 1 && options.allow_cached && !outcome.cached && outcome.complete;
    if (may_copy && outcome.cache_at && core_.random() % core_.options.copy_one_in == 0) {
      // Once the caller has its answer.
      core_.after(kCopyPause, [this, records = outcome.records, at = *outcome.cache_at] { leave_copies(records, at); });
    }
    merge(result.records, std::move(outcome.records));
    if (outcome.ended_by_deadline && result.records.empty()) {
      return settle(finding, index, Error{Errc::kDeadlineExceeded, "the DHT did not answer in time", {}});
    }
    settle(finding, index, std::move(result));
  };
  const auto lookup = core_.look_up(std::move(keys), options, on_key);
  if (!finding->options.deadline || lookup->finished()) return;
  finding->timed = true;
  finding->timer = core_.after(std::max(Duration{0}, *finding->options.deadline - core_.clock.now()),
                               [weak = std::weak_ptr<Lookup>(lookup)] {
                                 if (const auto late = weak.lock()) late->end(true);
                               });
}

/// For the next searches that come this way. Only what a holder said, never what a copy said: else copies of copies
/// would be fresh for ever. Only a whole answer that fits one datagram, and none with a withdrawal in it.
void Node::Impl::leave_copies(const std::vector<LiveRecord>& records, const wire::NodeInfo& at) {
  if (records.empty() || records.size() > wire::kMaxRecordsPerDatagram) return;
  wire::Store store;
  store.cache = true;
  std::size_t size = wire::kRequestOverhead;
  const TimePoint now = core_.clock.now();
  for (const LiveRecord& live : records) {
    const auto left = std::chrono::floor<std::chrono::milliseconds>(live.deadline - now).count() - 1;
    if (live.record.tombstone || left <= 0) return;
    wire::TravellingRecord travelling{live.record, static_cast<std::uint32_t>(left),
                                      static_cast<std::uint32_t>(live.record.value.size())};
    size += wire::record_size(travelling);
    if (size > kMaxDatagram) return;
    store.records.push_back(std::move(travelling));
  }
  Request request;
  request.to = at.address;
  request.expected = at.id;
  request.body = std::move(store);
  request.repeats = 0;
  core_.requests.start(std::move(request));
}

void Node::Impl::before_joining(std::function<void()> join) {
  if (!core_.options.detect_reach || core_.client) return join();
  reach_watch_.start(std::move(join));
}

void Node::Impl::on_reach_verdict(Reach reach) {
  set_client(reach == Reach::kUnreachable);
  if (on_reach_) on_reach_(reach, reach_test_.observed());
}

void Node::Impl::set_client(bool client) {
  if (std::exchange(core_.client, client) == client) return;
  core_.requests.set_client(client);
  if (client) {
    replicator_.leave();
  } else {
    membership_.look_soon();
  }
}

Node::Node(DatagramNetwork& network, Clock& clock, RandomSource random, RecordStore& store, const Signer& signer,
           NodeOptions options)
    : impl_(std::make_unique<Impl>(network, clock, std::move(random), store, signer, options)) {}

Node::~Node() = default;

void Node::stop() {
  assert(clock().on_strand());
  impl_->stop();
}

const NodeId& Node::id() const noexcept { return impl_->core().self; }
Clock& Node::clock() const noexcept { return impl_->core().clock; }

void Node::store_many(std::vector<StoreRequest> requests,
                      std::function<void(std::vector<Result<StoreReport>>)> handler) {
  assert(clock().on_strand());
  impl_->publisher().add(std::move(requests), std::move(handler));
}

void Node::store(StoreRequest request, std::function<void(Result<StoreReport>)> handler) {
  store_many({std::move(request)}, [handler = std::move(handler)](std::vector<Result<StoreReport>> results) {
    handler(std::move(results.front()));
  });
}

void Node::withdraw(Key key, std::string subkey, std::chrono::milliseconds ttl,
                    std::function<void(Result<StoreReport>)> handler) {
  store(StoreRequest{key, std::move(subkey), {}, ttl, true, false}, std::move(handler));
}

void Node::find_many(std::vector<Key> keys, FindOptions options,
                     std::function<void(std::vector<Result<FindResult>>)> handler) {
  assert(clock().on_strand());
  impl_->find_many(std::move(keys), options, std::move(handler));
}

void Node::find(Key key, FindOptions options, std::function<void(Result<FindResult>)> handler) {
  find_many({key}, options, [handler = std::move(handler)](std::vector<Result<FindResult>> results) {
    handler(std::move(results.front()));
  });
}

void Node::ping(const Address& address, std::function<void(Result<PingReport>)> handler) {
  assert(clock().on_strand());
  NodeCore& core = impl_->core();
  Request request;
  request.to = address;
  request.body = wire::Ping{};
  request.repeats = 2;
  request.on_reply = [&core, handler, start = core.clock.now()](const wire::Message& message,
                                                                const wire::Reply& reply) {
    PingReport report{message.sender_id, core.clock.now() - start, reply.observed};
    core.post([handler, report] { handler(report); });
  };
  request.on_failure = [&core, handler, address] {
    core.post([handler, address] {
      handler(Error{Errc::kDeadlineExceeded, "no DHT node answered at " + to_string(address), {}});
    });
  };
  core.requests.start(std::move(request));
}

void Node::nearest(const Bits& target, std::function<void(std::vector<wire::NodeInfo>)> handler) {
  assert(clock().on_strand());
  NodeCore& core = impl_->core();
  LookupOptions options;
  options.want_records = false;
  core.look_up({Key{target}}, options, [&core, handler](std::size_t, LookupOutcome outcome) {
    core.post([handler, nodes = std::move(outcome.nearest)] { handler(nodes); });
  });
}

void Node::bootstrap(std::vector<Address> peers, std::function<void()> on_contact,
                     std::function<void(const Address&)> on_conflict) {
  assert(clock().on_strand());
  impl_->membership().bootstrap(std::move(peers), std::move(on_contact), std::move(on_conflict));
}

void Node::set_client(bool client) {
  assert(clock().on_strand());
  impl_->set_client(client);
}

bool Node::is_client() const { return impl_->core().client; }

void Node::on_reach(std::function<void(Reach, const std::optional<Address>&)> handler) {
  assert(clock().on_strand());
  impl_->on_reach(std::move(handler));
}

void Node::test_reach(std::uint16_t port, std::function<void(Reach)> handler) {
  assert(clock().on_strand());
  impl_->reach_test().run(port, std::move(handler));
}

void Node::set_dialler(Dialler* dialler) { impl_->core().dialler = dialler; }

void Node::test_dial(std::uint16_t port, std::function<void(DialReport)> handler) {
  assert(clock().on_strand());
  run_dial_test(impl_->core(), port, std::move(handler));
}

NodeStats Node::stats() const {
  NodeCore& core = impl_->core();
  return {core.table.size(),
          core.requests.in_flight(),
          impl_->stopped() ? StoreStats{} : core.store.stats(),
          core.cache.size(),
          core.requests.sent() + core.answered,
          core.received,
          core.refused,
          core.verifier.signatures_checked()};
}

std::vector<wire::NodeInfo> Node::known_nodes() const {
  std::vector<wire::NodeInfo> nodes;
  for (const Contact& contact : impl_->core().table.contacts()) nodes.push_back({contact.id, contact.address});
  return nodes;
}

void Node::save_table() {
  if (!impl_->stopped()) impl_->save_table();
}

}  // namespace dmoe::dht
