#include "dht/publication.hpp"

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace dmoe::dht {
namespace {

constexpr std::size_t kCandidates = kReplication + 6;  // Who steps in where a holder is silent or full.
constexpr int kBitsOfChance = 2;
constexpr Duration kFreshEnough = std::chrono::minutes{2};

}  // namespace

Publication::Publication(NodeCore& core, std::vector<Record> records, OnRecord on_record)
    : core_(core),
      records_(std::move(records)),
      items_(records_.size()),
      on_record_(std::move(on_record)),
      signed_at_(core.clock.now()) {}

wire::TravellingRecord Publication::travelling(std::size_t index) const {
  const Record& record = records_[index];
  const auto age = std::chrono::ceil<std::chrono::milliseconds>(core_.clock.now() - signed_at_).count();
  const auto left = std::max<std::int64_t>(0, std::int64_t{record.max_ttl_ms} - age);
  return {record, static_cast<std::uint32_t>(left), static_cast<std::uint32_t>(record.value.size())};
}

/// Whether every one of the nearest proved itself, was heard lately and gave a cookie, and the network has hardly any
/// nearer ones: no walk would tell more than their acknowledgements do.
bool Publication::table_will_do(const std::vector<wire::NodeInfo>& nearest, const Key& key) const {
  if (nearest.size() < kReplication) return false;
  if (shared_prefix_bits(nearest[kReplication - 1].id.bytes, key.bytes) + kBitsOfChance < usual_bits_) return false;
  const TimePoint now = core_.clock.now();
  return std::all_of(nearest.begin(), nearest.begin() + kReplication, [&](const wire::NodeInfo& node) {
    const Peer* peer = core_.book.find(node.address);
    return peer != nullptr && peer->cookie != 0 && peer->proven == node.id && now - peer->last_heard < kFreshEnough;
  });
}

void Publication::start() {
  const auto neighbours = core_.table.closest(core_.self.bytes, kReplication);
  if (!neighbours.empty()) usual_bits_ = shared_prefix_bits(neighbours.back().id.bytes, core_.self.bytes);
  std::vector<Key> unknown;
  std::vector<std::size_t> unknown_index;
  for (std::size_t index = 0; index < records_.size(); ++index) {
    const Record& record = records_[index];
    if (!core_.client && core_.table.self_is_near(record.key.bytes)) {
      const TimePoint now = core_.clock.now();
      const auto outcome = core_.store.put({record, now + std::chrono::milliseconds{record.max_ttl_ms}}, 0, now);
      if (outcome == PutOutcome::kOlder) items_[index].newer_exists = true;
      if (outcome == PutOutcome::kStored || outcome == PutOutcome::kUnchanged) ++items_[index].replicas;
    }
    const auto nearest = core_.table.closest(record.key.bytes, kCandidates);
    if (table_will_do(nearest, record.key)) {
      items_[index].optimistic = true;
      for (const auto& node : nearest) add_holder(index, node);
    } else {
      unknown.push_back(record.key);
      unknown_index.push_back(index);
    }
  }
  if (!unknown.empty()) {
    LookupOptions options;
    options.want_records = false;
    core_.look_up(std::move(unknown), options,
                  [self = shared_from_this(), unknown_index](std::size_t at, LookupOutcome outcome) {
                    const std::size_t index = unknown_index[at];
                    for (const auto& node : outcome.nearest) self->add_holder(index, node);
                    if (outcome.nearest.empty()) self->finish_if_done(index);
                    self->dispatch_soon();
                  });
  }
  if (unknown_index.size() < records_.size()) dispatch();
}

void Publication::add_holder(std::size_t index, const wire::NodeInfo& node) {
  if (node.id == core_.self) return;
  auto& holders = items_[index].holders;
  const auto place =
      std::lower_bound(holders.begin(), holders.end(), node.id, [&](const Holder& known, const NodeId& id) {
        return closer(known.node.id.bytes, id.bytes, records_[index].key.bytes);
      });
  if (place != holders.end() && place->node.id == node.id) return;
  if (holders.size() >= 2 * kCandidates) {
    if (place == holders.end()) return;
    // Whoever refused, or is too far to be asked, makes way for who is nearer.
    const auto spent = std::find_if(holders.rbegin(), holders.rend(), [](const Holder& known) {
      return known.state == State::kRefused || known.state == State::kNew;
    });
    if (spent == holders.rend()) return;
    const auto index_of_spent = std::distance(spent, holders.rend()) - 1;
    const auto at = place - holders.begin();
    holders.erase(holders.begin() + index_of_spent);
    holders.insert(holders.begin() + (index_of_spent < at ? at - 1 : at), Holder{node, State::kNew, 0});
    return;
  }
  holders.insert(place, Holder{node, State::kNew, 0});
}

void Publication::dispatch_soon() {
  if (std::exchange(dispatch_posted_, true)) return;
  // Held: the lookup that called may be the last owner, and it ends before this runs.
  core_.post([self = shared_from_this()] {
    self->dispatch_posted_ = false;
    self->dispatch();
  });
}

void Publication::dispatch() {
  const auto alive = shared_from_this();
  std::vector<std::pair<wire::NodeInfo, std::vector<std::size_t>>> plan;
  std::unordered_map<NodeId, std::size_t> place;
  for (std::size_t index = 0; index < items_.size(); ++index) {
    Item& item = items_[index];
    if (item.done) continue;
    std::size_t in_front = 0;
    for (Holder& next : item.holders) {
      if (in_front >= kReplication) break;
      if (next.state == State::kRefused || next.state == State::kSlow) continue;
      ++in_front;
      if (next.state != State::kNew) continue;
      next.state = State::kSent;
      const auto [entry, fresh] = place.try_emplace(next.node.id, plan.size());
      if (fresh) plan.push_back({next.node, {}});
      plan[entry->second].second.push_back(index);
    }
  }
  for (const auto& [node, indices] : plan) send_group(node, indices);
}

void Publication::send_group(const wire::NodeInfo& node, const std::vector<std::size_t>& indices) {
  std::vector<std::size_t> group;
  std::size_t size = wire::kRequestOverhead;
  for (const std::size_t index : indices) {
    const std::size_t needed = wire::record_size(travelling(index));
    if (needed + wire::kRequestOverhead > kMaxDatagram) {
      send_chunks(node, index);
      continue;
    }
    if (size + needed > kMaxDatagram || group.size() == wire::kMaxRecordsPerDatagram) {
      send_store(node, std::exchange(group, {}));
      size = wire::kRequestOverhead;
    }
    group.push_back(index);
    size += needed;
  }
  if (!group.empty()) send_store(node, std::move(group));
}

void Publication::send_store(const wire::NodeInfo& node, std::vector<std::size_t> indices) {
  wire::Store store;
  for (const std::size_t index : indices) {
    store.records.push_back(travelling(index));
    const auto& holders = items_[index].holders;
    const bool speaks = holders.front().node.id == node.id ||
                        (holders.size() >= kReplication && holders[kReplication - 1].node.id == node.id);
    store.want_nodes = store.want_nodes || (items_[index].optimistic && speaks);
  }
  Request request;
  request.to = node.address;
  request.expected = node.id;
  request.body = std::move(store);
  request.repeats = 3;
  // The publication lives as long as its requests do: nobody else holds it.
  const auto self = shared_from_this();
  request.on_reply = [self, node, indices](const wire::Message&, const wire::Reply& reply) {
    for (std::size_t i = 0; i < indices.size(); ++i) {
      if (self->items_[indices[i]].done) continue;
      for (const auto& named : reply.nodes) {
        const auto& holders = self->items_[indices[i]].holders;
        const Bits& key = self->records_[indices[i]].key.bytes;
        // Only a nearer node than the eighth changes where the record belongs.
        if (holders.size() < kReplication || closer(named.id.bytes, holders[kReplication - 1].node.id.bytes, key)) {
          self->add_holder(indices[i], named);
        }
      }
      self->on_ack(node.id, indices[i], i < reply.acks.size() ? reply.acks[i] : wire::Ack::kFull);
    }
    self->dispatch_soon();
  };
  request.on_slow = [self, node, indices] {
    for (const std::size_t index : indices) self->set_state(node.id, index, State::kSlow);
    self->dispatch_soon();
  };
  request.on_failure = [self, node, indices] {
    for (const std::size_t index : indices) {
      self->set_state(node.id, index, State::kRefused);
      self->finish_if_done(index);
    }
    self->dispatch_soon();
  };
  core_.requests.start(std::move(request));
}

void Publication::send_chunks(const wire::NodeInfo& node, std::size_t index) {
  const auto self = shared_from_this();
  const Record& record = records_[index];
  wire::TravellingRecord header = travelling(index);
  header.record.value.clear();
  struct Progress {
    std::size_t open = 0;
    bool settled = false;
  };
  const auto progress = std::make_shared<Progress>();
  progress->open = (record.value.size() + wire::kChunkBytes - 1) / wire::kChunkBytes;
  const auto settle = [self, node, index, progress](wire::Ack ack) {
    --progress->open;
    if (progress->settled || (ack == wire::Ack::kMoreParts && progress->open != 0)) return;
    progress->settled = true;
    self->on_ack(node.id, index, ack);
    self->dispatch_soon();
  };
  for (std::size_t offset = 0; offset < record.value.size(); offset += wire::kChunkBytes) {
    wire::Chunk chunk{header, static_cast<std::uint32_t>(offset), {}};
    const std::size_t size = std::min(wire::kChunkBytes, record.value.size() - offset);
    chunk.data.assign(record.value.begin() + static_cast<std::ptrdiff_t>(offset),
                      record.value.begin() + static_cast<std::ptrdiff_t>(offset + size));
    Request request;
    request.to = node.address;
    request.expected = node.id;
    request.body = std::move(chunk);
    request.repeats = 4;
    request.on_reply = [settle](const wire::Message&, const wire::Reply& reply) {
      settle(reply.acks.size() == 1 ? reply.acks.front() : wire::Ack::kFull);
    };
    request.on_failure = [settle] { settle(wire::Ack::kFull); };
    core_.requests.start(std::move(request));
  }
}

Publication::Holder* Publication::holder(std::size_t index, const NodeId& id) {
  auto& holders = items_[index].holders;
  const auto found = std::find_if(holders.begin(), holders.end(), [&](const Holder& h) { return h.node.id == id; });
  return found == holders.end() ? nullptr : &*found;
}

void Publication::set_state(const NodeId& id, std::size_t index, State state) {
  if (Holder* known = holder(index, id)) known->state = state;
}

void Publication::on_ack(const NodeId& id, std::size_t index, wire::Ack ack) {
  Item& item = items_[index];
  Holder* known = holder(index, id);
  if (known == nullptr) return;
  switch (ack) {
    case wire::Ack::kStored:
      known->state = State::kStored;
      ++item.replicas;
      break;
    case wire::Ack::kBadCookie:
      // The reply brought the cookie to use.
      known->state = known->cookie_retries++ < 2 ? State::kNew : State::kRefused;
      break;
    case wire::Ack::kOlder:
      known->state = State::kRefused;
      item.newer_exists = true;
      break;
    case wire::Ack::kQuota:
    case wire::Ack::kFull: ++item.refused_full; [[fallthrough]];
    default: known->state = State::kRefused; ++item.refused;
  }
  finish_if_done(index);
}

void Publication::finish_if_done(std::size_t index) {
  Item& item = items_[index];
  if (item.done) return;
  std::size_t in_front = 0;
  bool slow = false;
  for (const Holder& known : item.holders) {
    if (known.state == State::kRefused) continue;
    if (known.state == State::kSlow) {
      slow = true;
      continue;
    }
    if (known.state != State::kStored) return;
    if (++in_front >= kReplication) break;
  }
  if (slow && item.replicas < kReplication) return;
  item.done = true;
  const auto alive = shared_from_this();
  on_record_(index,
             Fate{item.replicas, item.newer_exists, item.refused_full != 0 && item.refused_full == item.refused});
}

}  // namespace dmoe::dht
