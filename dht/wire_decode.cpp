#include "dht/wire.hpp"
#include "net/schema/dht.capnp.h"

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <kj/exception.h>

#include <algorithm>
#include <cstring>

namespace dmoe::dht::wire {
namespace {

using WordsIn = capnp::List<std::uint64_t>::Reader;

/// Thrown and caught in this file only: the first check that fails ends the datagram.
struct Malformed {};

void require(bool condition) {
  if (!condition) throw Malformed{};
}

void save(std::uint8_t* bytes, std::uint64_t word) noexcept { std::memcpy(bytes, &word, 8); }

Bits bits_at(WordsIn words, unsigned at) {
  Bits bits;
  for (unsigned i = 0; i < 4; ++i) save(bits.data() + i * 8, words[at + i]);
  return bits;
}

Address address_at(WordsIn words, unsigned at, bool v4) {
  if (v4) return Address::v4(static_cast<std::uint32_t>(words[at] >> 16U), static_cast<std::uint16_t>(words[at]));
  Address address;
  save(address.ip.data(), words[at]);
  save(address.ip.data() + 8, words[at + 1]);
  require(words[at + 2] <= 0xFFFF);
  address.port = static_cast<std::uint16_t>(words[at + 2]);
  return address;
}

std::optional<Address> optional_address(WordsIn words) {
  if (words.size() == 0) return {};
  require(words.size() == 1 || words.size() == 3);
  return address_at(words, 0, words.size() == 1);
}

std::vector<std::uint8_t> bytes_of(capnp::Data::Reader data) { return {data.begin(), data.end()}; }

TravellingRecord get(schema::Record::Reader in) {
  TravellingRecord travelling;
  Record& record = travelling.record;
  std::uint8_t* key = record.key.bytes.data();
  save(key, in.getKey0());
  save(key + 8, in.getKey1());
  save(key + 16, in.getKey2());
  save(key + 24, in.getKey3());
  std::uint8_t* publisher = record.publisher.data();
  save(publisher, in.getPublisher0());
  save(publisher + 8, in.getPublisher1());
  save(publisher + 16, in.getPublisher2());
  save(publisher + 24, in.getPublisher3());
  record.sequence = in.getSequence();
  record.max_ttl_ms = in.getMaxTtlMillis();
  travelling.remaining_ms = std::min(in.getRemainingMillis(), record.max_ttl_ms);
  travelling.value_size = in.getValueSize();
  record.tombstone = (in.getFlags() & 1U) != 0;
  record.batch_index = in.getIndex();

  const auto subkey = in.getSubkey();
  const auto value = in.getValue();
  const auto path = in.getPath();
  const auto signature = in.getSignature();
  require(subkey.size() <= kMaxSubkeyBytes);
  require(travelling.value_size <= kMaxValueBytes);
  require(value.size() == 0 || value.size() == travelling.value_size);
  require(path.size() % sizeof(BatchHash) == 0 && path.size() / sizeof(BatchHash) <= kMaxBatchDepth);
  require(signature.size() == record.signature.size());
  require(record.max_ttl_ms != 0);
  record.subkey.assign(reinterpret_cast<const char*>(subkey.begin()), subkey.size());
  record.value = bytes_of(value);
  record.batch_path.resize(path.size() / sizeof(BatchHash));
  if (path.size() != 0) std::memcpy(record.batch_path.data(), path.begin(), path.size());
  std::copy(signature.begin(), signature.end(), record.signature.begin());
  return travelling;
}

Find get(schema::Find::Reader in) {
  Find find;
  const auto keys = in.getKeys();
  require(keys.size() % 4 == 0 && keys.size() >= 4 && keys.size() <= kMaxKeysPerFind * 4);
  for (unsigned i = 0; i < keys.size(); i += 4) find.keys.push_back(Key{bits_at(keys, i)});
  find.nodes_per_key = in.getNodesPerKey();
  require(find.nodes_per_key <= 20);
  find.want_records = (in.getFlags() & 1U) != 0;
  find.allow_cached = (in.getFlags() & 2U) != 0;
  find.from = in.getFrom();
  require(find.from == 0 || find.keys.size() == 1);
  const auto turns = in.getTurns();
  require(turns.size() == 0 || turns.size() == find.keys.size());
  find.turns.assign(turns.begin(), turns.end());
  return find;
}

Store get(schema::Store::Reader in) {
  Store store;
  store.want_nodes = in.getWantNodes();
  store.cache = in.getCache();
  const auto records = in.getRecords();
  require(records.size() >= 1 && records.size() <= kMaxRecordsPerDatagram);
  for (const auto record : records) {
    store.records.push_back(get(record));
    require(store.records.back().whole());
  }
  return store;
}

Chunk get(schema::Chunk::Reader in) {
  Chunk chunk;
  require(in.hasRecord());
  chunk.record = get(in.getRecord());
  chunk.offset = in.getOffset();
  chunk.data = bytes_of(in.getData());
  require(chunk.record.record.value.empty());
  require(!chunk.data.empty() && chunk.data.size() <= kChunkBytes && chunk.offset % kChunkBytes == 0);
  require(chunk.offset <= chunk.record.value_size && chunk.data.size() <= chunk.record.value_size - chunk.offset);
  return chunk;
}

Fetch get(schema::Fetch::Reader in) {
  Fetch fetch;
  require(in.getKey().size() == 4 && in.getPublisher().size() == 4 && in.getSubkey().size() <= kMaxSubkeyBytes);
  fetch.key.bytes = bits_at(in.getKey(), 0);
  fetch.publisher = bits_at(in.getPublisher(), 0);
  fetch.subkey.assign(reinterpret_cast<const char*>(in.getSubkey().begin()), in.getSubkey().size());
  fetch.sequence = in.getSequence();
  fetch.offset = in.getOffset();
  require(fetch.offset < kMaxValueBytes);
  return fetch;
}

Probe get(schema::Probe::Reader in) {
  Probe probe;
  require(in.getStage() <= static_cast<std::uint8_t>(Probe::Stage::kDial));
  probe.stage = static_cast<Probe::Stage>(in.getStage());
  probe.port = in.getPort();
  probe.nonce = in.getNonce();
  if (probe.stage == Probe::Stage::kRelay) {
    const auto target = optional_address(in.getTarget());
    require(target.has_value());
    probe.target = *target;
  }
  return probe;
}

void get_nodes(WordsIn words, bool v4, std::vector<NodeInfo>& out) {
  const unsigned stride = v4 ? 5 : 7;
  require(words.size() % stride == 0);
  for (unsigned i = 0; i < words.size(); i += stride) {
    out.push_back({NodeId{bits_at(words, i)}, address_at(words, i + 4, v4)});
  }
  require(out.size() <= kMaxNodes);
}

std::vector<KeyRecords> get(capnp::List<schema::KeyRecords>::Reader in) {
  std::vector<KeyRecords> found;
  require(in.size() <= kMaxKeysPerFind);
  std::size_t records = 0;
  for (const auto entry : in) {
    KeyRecords& key = found.emplace_back();
    key.index = entry.getIndex();
    key.cached = entry.getCached();
    key.total = entry.getTotal();
    key.from = entry.getFrom();
    require(key.from == 0 || key.from < key.total);
    const auto tags = entry.getTags();
    require(tags.size() == 0 || (tags.size() == key.total && tags.size() <= kMaxTags));
    key.tags.reserve(tags.size());
    for (const std::uint16_t tag : tags) key.tags.push_back(tag);
    require(key.index < kMaxKeysPerFind);
    records += entry.getRecords().size();
    require(records <= kMaxRecordsPerDatagram);
    for (const auto record : entry.getRecords()) key.records.push_back(get(record));
  }
  return found;
}

Reply get(schema::Reply::Reader in) {
  Reply reply;
  reply.done_keys = in.getDoneKeys();
  reply.observed = optional_address(in.getObserved());
  reply.conflict = optional_address(in.getConflict());
  get_nodes(in.getNodes4(), true, reply.nodes);
  get_nodes(in.getNodes6(), false, reply.nodes);
  reply.found = get(in.getFound());
  const auto acks = in.getAcks();
  require(acks.size() <= kMaxRecordsPerDatagram);
  for (const std::uint8_t ack : acks) {
    require(ack <= static_cast<std::uint8_t>(Ack::kUnreachable));
    reply.acks.push_back(static_cast<Ack>(ack));
  }
  if (in.hasPart()) {
    Part& part = reply.part.emplace();
    part.offset = in.getPart().getOffset();
    part.total = in.getPart().getTotal();
    part.data = bytes_of(in.getPart().getData());
    require(part.total <= kMaxValueBytes && part.data.size() <= kPartBytes && part.offset <= part.total &&
            part.data.size() <= part.total - part.offset);
  }
  const auto proof = in.getProof();
  if (proof.size() != 0) {
    require(proof.size() == 64);
    std::copy(proof.begin(), proof.end(), reply.proof.emplace().begin());
  }
  return reply;
}

Message get(schema::Datagram::Reader in) {
  require(in.getVersion() == 1);
  Message message;
  message.transaction = in.getTransaction();
  message.cookie = in.getCookie();
  message.client = (in.getFlags() & 1U) != 0;
  message.prove = (in.getFlags() & 2U) != 0;
  save(message.sender.data(), in.getSender0());
  save(message.sender.data() + 8, in.getSender1());
  save(message.sender.data() + 16, in.getSender2());
  save(message.sender.data() + 24, in.getSender3());
  message.sender_id = net::peer_id_of(message.sender);
  switch (in.which()) {
    case schema::Datagram::PING: message.body = Ping{}; break;
    case schema::Datagram::FIND: message.body = get(in.getFind()); break;
    case schema::Datagram::STORE: message.body = get(in.getStore()); break;
    case schema::Datagram::CHUNK: message.body = get(in.getChunk()); break;
    case schema::Datagram::FETCH: message.body = get(in.getFetch()); break;
    case schema::Datagram::PROBE: message.body = get(in.getProbe()); break;
    case schema::Datagram::REPLY: message.body = get(in.getReply()); break;
    default: throw Malformed{};
  }
  return message;
}

/// What can be seen before Cap'n Proto looks: noise from the internet is refused without an exception.
bool looks_like_a_message(std::span<const std::uint8_t> datagram) noexcept {
  if (datagram.size() < 8 + 8 || datagram.size() > kMaxDatagram) return false;
  std::uint32_t header[2];
  std::memcpy(header, datagram.data(), 8);
  return header[0] == 0 && header[1] >= 2 && header[1] <= (datagram.size() - 8) / 8;
}

}  // namespace

std::optional<Message> decode(std::span<const std::uint8_t> datagram) noexcept {
  if (!looks_like_a_message(datagram)) return {};
  try {
    std::uint32_t words = 0;
    std::memcpy(&words, datagram.data() + 4, 4);
    alignas(8) std::array<std::uint8_t, kMaxDatagram> aligned;
    const std::uint8_t* data = datagram.data();
    if (reinterpret_cast<std::uintptr_t>(data) % 8 != 0) {
      std::memcpy(aligned.data(), data, datagram.size());
      data = aligned.data();
    }
    capnp::ReaderOptions options;
    options.traversalLimitInWords = 4 * kMaxDatagram / 8;  // Getters are called more than once per pointer.
    options.nestingLimit = 8;
    const kj::ArrayPtr<const capnp::word> segment(reinterpret_cast<const capnp::word*>(data + 8), words);
    const kj::ArrayPtr<const capnp::word> segments[1] = {segment};
    capnp::SegmentArrayMessageReader reader(kj::arrayPtr(segments, 1), options);
    return get(reader.getRoot<schema::Datagram>());
  } catch (const Malformed&) {
    return {};
  } catch (const kj::Exception&) {
    return {};
  } catch (const std::exception&) {
    return {};
  }
}

}  // namespace dmoe::dht::wire
