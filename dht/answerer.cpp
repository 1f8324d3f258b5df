#include "dht/answerer.hpp"

#include <algorithm>
#include <cmath>

namespace dmoe::dht {
namespace {

constexpr std::size_t kMaxAssemblies = 64;
constexpr std::size_t kMaxAssembliesPerAddress = 16;
constexpr std::chrono::seconds kAssemblyLife{15};
constexpr std::size_t kMaxChallenges = 16;
constexpr std::chrono::minutes kHeardLately{2};  // Who is asked to knock should be there.
constexpr std::size_t kMaxDialling = 16;         // TCP connections being opened for others.
constexpr std::size_t kDialsPerMinute = 8;       // To one host: two askers at each heartbeat of theirs.
constexpr std::size_t kMaxDialled = 1'024;
constexpr std::size_t kMaxAllowances = 4'096;
constexpr std::size_t kFewAllowances = 512;
// Tokens a host gets a second, and may save up. A signature costs one: 36 us here.
constexpr double kTokensPerSecond = 64;
constexpr double kTokenBurst = 512;
constexpr double kBadSignatureCost = 16;  // Verifying costs more than signing, and only a liar makes it fail.

}  // namespace

void Answerer::on_request(const Address& source, const wire::Message& message, std::size_t size) {
  if (message.sender == core_.signer.public_key()) return;  // Ourselves, or somebody with our key: not a peer.
  if (identity_is_elsewhere(source, message, size)) return;
  answer(source, message, size, {});
}

/// A known id at a new address: whoever is known is asked first, and the stranger answered when that is settled.
bool Answerer::identity_is_elsewhere(const Address& source, const wire::Message& message, std::size_t size) {
  const NodeId& id = message.sender_id;
  const Contact* known = core_.table.find(id);
  if (known == nullptr || known->address == source) return false;
  if (challenged_.contains(id) || challenged_.size() >= kMaxChallenges) return true;
  challenged_.insert(id);
  Request challenge;
  challenge.to = known->address;
  challenge.expected = id;
  challenge.body = wire::Ping{};
  challenge.repeats = 2;
  challenge.fresh_proof = true;
  challenge.on_reply = [this, id = id, source, message, size, at = known->address](const wire::Message&,
                                                                                   const wire::Reply&) {
    challenged_.erase(id);
    answer(source, message, size, at);
  };
  challenge.on_failure = [this, id = id, source, message, size] {
    challenged_.erase(id);
    core_.table.remove(id);
    answer(source, message, size, {});
  };
  core_.requests.start(std::move(challenge));
  return true;
}

void Answerer::answer(const Address& source, const wire::Message& message, std::size_t size,
                      std::optional<Address> conflict, std::optional<wire::Ack> probed) {
  const TimePoint now = core_.clock.now();
  const bool trusted = core_.jar.valid(message.cookie, source, now);
  const std::size_t limit = trusted ? kMaxDatagram : std::min(size, kMaxDatagram);
  const std::size_t room = limit > wire::kReplyOverhead ? limit - wire::kReplyOverhead : 0;
  const NodeId& id = message.sender_id;

  wire::Reply reply;
  reply.observed = source;
  reply.conflict = conflict;
  if (message.prove) add_proof(source, message, reply);
  if (const auto* find = std::get_if<wire::Find>(&message.body)) {
    if (!core_.client) answer_find(*find, room, reply);  // A client answers about nothing, and is taken off the tables.
  } else if (const auto* store = std::get_if<wire::Store>(&message.body)) {
    answer_store(source, *store, trusted, room, reply);
  } else if (const auto* chunk = std::get_if<wire::Chunk>(&message.body)) {
    reply.acks = {take_chunk(source, *chunk, trusted)};
  } else if (const auto* fetch = std::get_if<wire::Fetch>(&message.body)) {
    answer_fetch(*fetch, room, reply);
  } else if (const auto* probe = std::get_if<wire::Probe>(&message.body)) {
    if (probe->stage == wire::Probe::Stage::kKnock) {
      hooks_.on_knock(source, probe->nonce, message.transaction);
    } else if (probe->stage == wire::Probe::Stage::kRelay) {
      reply.acks = {trusted && knock(source, *probe) ? wire::Ack::kStored : wire::Ack::kFull};
    } else if (!trusted) {
      reply.acks = {wire::Ack::kBadCookie};
    } else if (probed) {
      reply.acks = {*probed};
    } else {
      const auto done = [this, source, message, size](wire::Ack ack) { answer(source, message, size, {}, ack); };
      return probe->stage == wire::Probe::Stage::kDial ? dial(source, *probe, done)
                                                       : ask_for_knock(source, *probe, done);
    }
  }

  wire::Message out;
  out.transaction = message.transaction;
  out.cookie = core_.jar.cookie_for(source, now);
  out.sender = core_.signer.public_key();
  out.client = core_.client;
  out.body = std::move(reply);
  if (!wire::encode(out, buffer_)) return;
  if (!trusted && buffer_.bytes().size() > size) return;  // A request so short that any answer would amplify it.
  ++core_.answered;
  core_.network.send(source, buffer_.bytes());

  if (trusted) core_.last_heard = now;
  if (message.client) {
    // It says so itself, from the address that it proved: nobody reaches it there any more.
    const Contact* known = trusted ? core_.table.find(id) : nullptr;
    if (known != nullptr && known->address == source) core_.table.remove(id);
    return;
  }
  if (conflict) return;
  if (trusted) core_.table.heard(id, source, now);
  hooks_.on_stranger(id, source);
}

/// Token bucket per host. Loopback is this machine's own.
bool Answerer::spend(const Address& source, double cost) {
  if (source.is_loopback()) return true;
  const TimePoint now = core_.clock.now();
  if (allowances_.size() >= kMaxAllowances && !allowances_.contains(source.host())) {
    forget_full_allowances(now);
    if (allowances_.size() >= kMaxAllowances) return false;
  }
  const auto [entry, fresh] = allowances_.try_emplace(source.host(), Allowance{kTokenBurst, now});
  Allowance& allowance = entry->second;
  const double seconds = std::chrono::duration<double>(now - allowance.since).count();
  allowance.tokens = std::min(kTokenBurst, allowance.tokens + seconds * kTokensPerSecond);
  allowance.since = now;
  if (allowance.tokens < cost) return false;
  allowance.tokens -= cost;
  return true;
}

/// Who used nothing for eight seconds has saved up all that there is to save.
void Answerer::forget_full_allowances(TimePoint now) {
  std::erase_if(allowances_, [&](const auto& entry) { return now - entry.second.since > std::chrono::seconds{8}; });
}

void Answerer::add_proof(const Address& source, const wire::Message& message, wire::Reply& reply) {
  if (!spend(source, 1)) return;
  reply.proof = core_.signer.sign(wire::proof_message(message.transaction, message.sender));
}

/// Which records there are, so that the asker knows which it has from others. They may take a record's place.
/// @return how many bytes more the reply takes; may be less than nothing.
std::ptrdiff_t Answerer::add_tags(const Key& key, std::size_t room, TimePoint now, wire::KeyRecords& found) {
  const std::size_t size = (found.total * sizeof(std::uint16_t) + 7) / 8 * 8;
  std::ptrdiff_t more = 0;
  if (size > room) {
    if (found.records.size() < 2) return 0;
    more -= static_cast<std::ptrdiff_t>(wire::record_size(found.records.back()));
    if (size > room + static_cast<std::size_t>(-more)) return 0;
    found.records.pop_back();
  }
  core_.store.visit(key, now, 0, [&](const LiveRecord& live) {
    found.tags.push_back(record_tag(live.record));
    return true;
  });
  if (found.tags.size() == found.total) return more + static_cast<std::ptrdiff_t>(size);
  found.tags.clear();
  return more;
}

/// Whoever asks all holders of a key has each begin elsewhere: together their first pages are most of its records.
std::size_t Answerer::first_record(const wire::Find& find, std::size_t index, TimePoint now) {
  const std::size_t total = core_.store.visit(find.keys[index], now, SIZE_MAX, [](const LiveRecord&) { return false; });
  return total * find.turns[index] / 256;
}

std::size_t Answerer::add_records(const wire::Find& find, std::size_t index, std::size_t& room, wire::Reply& reply,
                                  bool& fits) {
  wire::KeyRecords found;
  found.index = static_cast<std::uint8_t>(index);
  std::size_t used = wire::kKeyRecordsOverhead;
  const std::size_t share = room / (find.keys.size() - index);  // The rest is for the keys after this one.
  std::size_t in_reply = 0;
  for (const wire::KeyRecords& earlier : reply.found) in_reply += earlier.records.size();
  const TimePoint now = core_.clock.now();
  bool full = false;
  const auto take = [&](const LiveRecord& live) {
    wire::TravellingRecord travelling{live.record, 0, static_cast<std::uint32_t>(live.record.value.size())};
    // One millisecond less at each hop: lifetimes shrink on their way, never grow.
    const auto left = std::chrono::floor<std::chrono::milliseconds>(live.deadline - now).count() - 1;
    if (left <= 0) return true;
    travelling.remaining_ms = static_cast<std::uint32_t>(std::min<std::int64_t>(left, live.record.max_ttl_ms));
    if (wire::record_size(travelling) > wire::kMaxInlineRecord) travelling.record.value.clear();
    const std::size_t size = wire::record_size(travelling);
    full = used + size > (found.records.empty() ? room : share) ||
           in_reply + found.records.size() >= wire::kMaxRecordsPerDatagram;
    if (full) return false;
    used += size;
    found.records.push_back(std::move(travelling));
    return true;
  };
  const std::size_t start = find.turns.empty() ? find.from : first_record(find, index, now);
  const std::size_t total = core_.store.visit(find.keys[index], now, start, take);
  if (find.from == 0 && start != 0 && !full) {  // Round to where it began.
    std::size_t left = start;
    core_.store.visit(find.keys[index], now, 0, [&](const LiveRecord& live) { return left-- != 0 && take(live); });
  }
  fits = total <= start || !found.records.empty();
  if (found.records.empty()) return total;
  found.from = static_cast<std::uint32_t>(start);
  found.total = static_cast<std::uint32_t>(total);
  if (full && !find.turns.empty() && total <= wire::kMaxTags) {
    used = static_cast<std::size_t>(static_cast<std::ptrdiff_t>(used) +
                                    add_tags(find.keys[index], room - used, now, found));
  }
  room -= used;
  reply.found.push_back(std::move(found));
  return total;
}

/// A copy of all that a holder had, where it fits as a whole: what is missing would be taken for not being there.
bool Answerer::add_copies(const wire::Find& find, std::size_t index, std::size_t& room, wire::Reply& reply) {
  const TimePoint now = core_.clock.now();
  wire::KeyRecords found;
  found.index = static_cast<std::uint8_t>(index);
  found.cached = true;
  std::size_t used = wire::kKeyRecordsOverhead;
  std::size_t in_reply = 0;
  for (const wire::KeyRecords& earlier : reply.found) in_reply += earlier.records.size();
  for (LiveRecord& live : core_.cache.get(find.keys[index], now)) {
    const auto left = std::chrono::floor<std::chrono::milliseconds>(live.deadline - now).count() - 1;
    if (left <= 0) return false;
    wire::TravellingRecord travelling{std::move(live.record), static_cast<std::uint32_t>(left), 0};
    travelling.value_size = static_cast<std::uint32_t>(travelling.record.value.size());
    used += wire::record_size(travelling);
    found.records.push_back(std::move(travelling));
  }
  const std::size_t share = room / (find.keys.size() - index);
  if (found.records.empty() || used > share || in_reply + found.records.size() > wire::kMaxRecordsPerDatagram) {
    return false;
  }
  found.total = static_cast<std::uint32_t>(found.records.size());
  room -= used;
  reply.found.push_back(std::move(found));
  return true;
}

void Answerer::add_nodes(const std::vector<wire::NodeInfo>& nodes, std::size_t& room, wire::Reply& reply) {
  for (const wire::NodeInfo& node : nodes) {
    const std::size_t size = wire::node_size(node.address);
    if (size > room || reply.nodes.size() >= wire::kMaxNodes) return;
    if (std::find(reply.nodes.begin(), reply.nodes.end(), node) != reply.nodes.end()) continue;
    room -= size;
    reply.nodes.push_back(node);
  }
}

bool Answerer::answer_find(const wire::Find& find, std::size_t room, wire::Reply& reply) {
  std::vector<std::size_t> without;
  for (std::size_t index = 0; index < find.keys.size(); ++index) {
    bool fits = true;
    const std::size_t total = find.want_records ? add_records(find, index, room, reply, fits) : 0;
    if (!fits) continue;
    reply.done_keys |= 1ULL << index;
    if (total != 0) continue;
    if (find.allow_cached && find.from == 0 && add_copies(find, index, room, reply)) continue;
    without.push_back(index);
  }
  for (const std::size_t index : without) {
    add_nodes(core_.table.closest(find.keys[index].bytes, find.nodes_per_key), room, reply);
  }
  // Who has the records still names a few others that should: the asker may want several opinions.
  if (without.empty() && find.from == 0 && find.nodes_per_key != 0) {
    add_nodes(core_.table.closest(find.keys.front().bytes, 4), room, reply);
  }
  return true;
}

void Answerer::answer_store(const Address& source, const wire::Store& store, bool trusted, std::size_t room,
                            wire::Reply& reply) {
  if (store.cache && trusted) {
    keep_copies(source, store);
    reply.acks.assign(store.records.size(), wire::Ack::kNotHolder);  // Copies are no replicas, whoever counts.
    return;
  }
  for (const wire::TravellingRecord& travelling : store.records) {
    reply.acks.push_back(trusted ? keep(source, travelling) : wire::Ack::kBadCookie);
  }
  // Whoever comes to the wrong one is told the right ones.
  const bool lost = std::find(reply.acks.begin(), reply.acks.end(), wire::Ack::kNotHolder) != reply.acks.end();
  if ((!store.want_nodes && !lost) || !trusted || core_.client) return;
  for (const wire::TravellingRecord& travelling : store.records) {
    add_nodes(core_.table.closest(travelling.record.key.bytes, kReplication), room, reply);
  }
}

/// Copies of one key's records for readers on their way. A holder has no use for them.
void Answerer::keep_copies(const Address& source, const wire::Store& store) {
  const Key& key = store.records.front().record.key;
  const TimePoint now = core_.clock.now();
  if (core_.client || core_.store.visit(key, now, 0, [](const LiveRecord&) { return false; }) != 0) return;
  const auto have = core_.cache.get(key, now);
  const bool known =
      have.size() == store.records.size() &&
      std::equal(have.begin(), have.end(), store.records.begin(), [](const auto& ours, const auto& theirs) {
        return ours.record.replaces(theirs.record) && ours.record.sequence >= theirs.record.sequence;
      });
  if (known) return;  // Nothing to verify, and nothing that would live longer.
  if (!spend(source, 0.5 * static_cast<double>(store.records.size()))) return;
  std::vector<LiveRecord> copies;
  for (const wire::TravellingRecord& travelling : store.records) {
    const Record& record = travelling.record;
    if (record.key != key || record.tombstone || travelling.remaining_ms == 0 || !check_limits(record).has_value()) {
      return;
    }
    if (!core_.verifier.verify(record)) {
      spend(source, kBadSignatureCost);
      ++core_.refused;
      return;
    }
    const auto life = std::min<Duration>(std::chrono::milliseconds{travelling.remaining_ms}, core_.options.max_ttl);
    copies.push_back({record, now + life});
  }
  core_.cache.put(key, std::move(copies), source.host(), now);
}

wire::Ack Answerer::keep(const Address& source, const wire::TravellingRecord& travelling) {
  const Record& record = travelling.record;
  if (core_.client) return wire::Ack::kNotHolder;
  if (travelling.remaining_ms == 0) return wire::Ack::kExpired;
  if (!check_limits(record).has_value()) return wire::Ack::kQuota;
  const auto nearest = core_.table.closest(record.key.bytes, kBucketSize);
  if (nearest.size() == kBucketSize && closer(nearest.back().id.bytes, core_.self.bytes, record.key.bytes)) {
    return wire::Ack::kNotHolder;
  }
  if (!spend(source, 0.5)) return wire::Ack::kQuota;
  if (!core_.verifier.verify(record)) {
    spend(source, kBadSignatureCost);
    ++core_.refused;
    return wire::Ack::kBadSignature;
  }
  const TimePoint now = core_.clock.now();
  const auto life = std::min<Duration>(std::chrono::milliseconds{travelling.remaining_ms}, core_.options.max_ttl);
  core_.cache.drop(record.key);  // What is held goes before what was copied.
  switch (core_.store.put({record, now + life}, source.host(), now)) {
    case PutOutcome::kStored:
    case PutOutcome::kUnchanged: return wire::Ack::kStored;
    case PutOutcome::kOlder: return wire::Ack::kOlder;
    case PutOutcome::kQuota: return wire::Ack::kQuota;
    case PutOutcome::kFull: return wire::Ack::kFull;
  }
  return wire::Ack::kFull;
}

wire::Ack Answerer::take_chunk(const Address& source, const wire::Chunk& chunk, bool trusted) {
  if (!trusted) return wire::Ack::kBadCookie;
  if (core_.client) return wire::Ack::kNotHolder;
  const Record& record = chunk.record.record;
  const TimePoint now = core_.clock.now();
  const auto held = core_.store.get(record.key, record.publisher, record.subkey, now);
  if (held && held->record.sequence == record.sequence) return wire::Ack::kStored;  // A late repeat.
  if (held && held->record.sequence > record.sequence) return wire::Ack::kOlder;
  const AssemblyId id{source, record.key, record.publisher, record.subkey, record.sequence};
  auto found = assemblies_.find(id);
  if (found == assemblies_.end()) {
    const auto from_there = std::count_if(assemblies_.begin(), assemblies_.end(),
                                          [&](const auto& entry) { return std::get<0>(entry.first) == source; });
    if (static_cast<std::size_t>(from_there) >= kMaxAssembliesPerAddress) return wire::Ack::kQuota;
    if (assemblies_.size() >= kMaxAssemblies) return wire::Ack::kFull;
    Assembly fresh;
    fresh.travelling = chunk.record;
    fresh.travelling.record.value.resize(chunk.record.value_size);
    fresh.missing = (chunk.record.value_size + wire::kChunkBytes - 1) / wire::kChunkBytes;
    fresh.have.resize(fresh.missing);
    found = assemblies_.emplace(id, std::move(fresh)).first;
  }
  Assembly& assembly = found->second;
  const std::size_t size = assembly.travelling.value_size;
  const std::size_t expected =
      std::min<std::size_t>(wire::kChunkBytes, size - std::min<std::size_t>(chunk.offset, size));
  if (chunk.record.value_size != size || chunk.data.size() != expected) return wire::Ack::kBadSignature;
  assembly.touched = now;
  const std::size_t index = chunk.offset / wire::kChunkBytes;
  if (!assembly.have[index]) {
    assembly.have[index] = true;
    --assembly.missing;
    std::copy(chunk.data.begin(), chunk.data.end(), assembly.travelling.record.value.begin() + chunk.offset);
  }
  if (assembly.missing != 0) return wire::Ack::kMoreParts;
  const wire::TravellingRecord whole = std::move(assembly.travelling);
  assemblies_.erase(found);
  return keep(source, whole);
}

void Answerer::expire_assemblies() {
  const TimePoint now = core_.clock.now();
  std::erase_if(assemblies_, [&](const auto& entry) { return now - entry.second.touched > kAssemblyLife; });
  if (allowances_.size() > kFewAllowances) forget_full_allowances(now);
}

void Answerer::answer_fetch(const wire::Fetch& fetch, std::size_t room, wire::Reply& reply) {
  wire::Part part;
  const auto held = core_.store.get(fetch.key, fetch.publisher, fetch.subkey, core_.clock.now());
  if (held && held->record.sequence == fetch.sequence && fetch.offset < held->record.value.size()) {
    const auto& value = held->record.value;
    const std::size_t size =
        std::min({wire::kPartBytes, value.size() - fetch.offset, room > 24 ? (room - 24) / 8 * 8 : 0});
    part.offset = fetch.offset;
    part.total = static_cast<std::uint32_t>(value.size());
    part.data.assign(value.begin() + fetch.offset, value.begin() + static_cast<std::ptrdiff_t>(fetch.offset + size));
  }
  reply.part = std::move(part);
}

/// Dial-back: whoever asks is reached by a third node, which it has not contacted. Only its own IP address is dialled.
void Answerer::ask_for_knock(const Address& source, const wire::Probe& probe, std::function<void(wire::Ack)> done) {
  const TimePoint now = core_.clock.now();
  std::vector<Contact> others = core_.table.contacts();
  std::erase_if(others, [&](const Contact& contact) {
    const bool same_host = contact.address.host() == source.host() && !source.is_loopback();
    return same_host || contact.address == source || now - contact.last_heard > kHeardLately;
  });
  if (core_.client || others.empty() || !spend(source, kBadSignatureCost)) return done(wire::Ack::kFull);
  Address target = source;
  if (probe.port != 0) target.port = probe.port;
  const Contact& other = others[core_.random() % others.size()];
  Request request;
  request.to = other.address;
  request.expected = other.id;
  request.body = wire::Probe{wire::Probe::Stage::kRelay, 0, probe.nonce, target};
  request.on_reply = [done](const wire::Message&, const wire::Reply& reply) {
    const bool knocked = reply.acks.size() == 1 && reply.acks.front() == wire::Ack::kStored;
    done(knocked ? wire::Ack::kStored : wire::Ack::kFull);
  };
  request.on_failure = [done] { done(wire::Ack::kFull); };
  core_.requests.start(std::move(request));
}

/// Only the address that the asker wrote from, which its cookie proves: nobody is dialled on another's word. The
/// connection carries nothing.
void Answerer::dial(const Address& source, const wire::Probe& probe, std::function<void(wire::Ack)> done) {
  if (core_.dialler == nullptr || probe.port == 0 || dialling_ >= kMaxDialling || !may_dial(source)) {
    return done(wire::Ack::kFull);
  }
  Address target = source;
  target.port = probe.port;
  ++dialling_;
  core_.dialler->dial(target, [this, done, watched = std::weak_ptr<const bool>(core_.alive)](bool connected) {
    if (watched.expired()) return;
    --dialling_;
    done(connected ? wire::Ack::kStored : wire::Ack::kUnreachable);
  });
}

bool Answerer::may_dial(const Address& source) {
  if (source.is_loopback()) return true;
  const TimePoint now = core_.clock.now();
  if (now - dialled_since_ > std::chrono::minutes{1}) {
    dialled_.clear();
    dialled_since_ = now;
  }
  if (dialled_.size() >= kMaxDialled && !dialled_.contains(source.host())) return false;
  return ++dialled_[source.host()] <= kDialsPerMinute;
}

bool Answerer::knock(const Address& source, const wire::Probe& probe) {
  if (core_.client || !may_name(source, probe.target) || !spend(source, kBadSignatureCost)) return false;
  Request request;
  request.repeats = 1;
  request.to = probe.target;
  request.body = wire::Probe{wire::Probe::Stage::kKnock, 0, probe.nonce, {}};
  core_.requests.start(std::move(request));
  return true;
}

}  // namespace dmoe::dht
