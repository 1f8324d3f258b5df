#include "dht/wire.hpp"
#include "net/schema/dht.capnp.h"

#include <capnp/message.h>

#include <algorithm>
#include <cstring>

namespace dmoe::dht::wire {
namespace {

using WordsOut = capnp::List<std::uint64_t>::Builder;

std::uint64_t load(const std::uint8_t* bytes) noexcept {
  std::uint64_t word = 0;
  std::memcpy(&word, bytes, 8);
  return word;
}

std::uint64_t v4_word(const Address& address) noexcept {
  std::uint64_t word = 0;
  for (std::size_t i = 12; i < 16; ++i) word = (word << 8U) | address.ip[i];
  return (word << 16U) | address.port;
}

void put_address(WordsOut words, unsigned at, const Address& address) {
  if (address.is_v4()) {
    words.set(at, v4_word(address));
    return;
  }
  words.set(at, load(address.ip.data()));
  words.set(at + 1, load(address.ip.data() + 8));
  words.set(at + 2, address.port);
}

unsigned address_words(const Address& address) { return address.is_v4() ? 1 : 3; }

void put_bits(WordsOut words, unsigned at, const Bits& bits) {
  for (unsigned i = 0; i < 4; ++i) words.set(at + i, load(bits.data() + i * 8));
}

capnp::Data::Reader data_of(std::span<const std::uint8_t> bytes) { return {bytes.data(), bytes.size()}; }

void put(const TravellingRecord& travelling, schema::Record::Builder out) {
  const Record& record = travelling.record;
  const std::uint8_t* key = record.key.bytes.data();
  out.setKey0(load(key));
  out.setKey1(load(key + 8));
  out.setKey2(load(key + 16));
  out.setKey3(load(key + 24));
  const std::uint8_t* publisher = record.publisher.data();
  out.setPublisher0(load(publisher));
  out.setPublisher1(load(publisher + 8));
  out.setPublisher2(load(publisher + 16));
  out.setPublisher3(load(publisher + 24));
  out.setSequence(record.sequence);
  out.setMaxTtlMillis(record.max_ttl_ms);
  out.setRemainingMillis(travelling.remaining_ms);
  out.setValueSize(travelling.value_size);
  out.setFlags(record.tombstone ? 1 : 0);
  out.setIndex(record.batch_index);
  if (!record.subkey.empty()) {
    out.setSubkey({reinterpret_cast<const std::uint8_t*>(record.subkey.data()), record.subkey.size()});
  }
  if (!record.value.empty()) out.setValue(data_of(record.value));
  if (!record.batch_path.empty()) {
    auto path = out.initPath(static_cast<unsigned>(record.batch_path.size() * sizeof(BatchHash)));
    std::memcpy(path.begin(), record.batch_path.data(), path.size());
  }
  out.setSignature(data_of(record.signature));
}

void put_body(const Ping&, schema::Datagram::Builder out) { out.setPing(); }

void put_body(const Find& find, schema::Datagram::Builder out) {
  auto body = out.initFind();
  auto keys = body.initKeys(static_cast<unsigned>(find.keys.size() * 4));
  for (unsigned i = 0; i < find.keys.size(); ++i) put_bits(keys, i * 4, find.keys[i].bytes);
  body.setNodesPerKey(find.nodes_per_key);
  body.setFlags(static_cast<std::uint8_t>((find.want_records ? 1U : 0U) | (find.allow_cached ? 2U : 0U)));
  body.setFrom(find.from);
  if (!find.turns.empty()) body.setTurns(data_of(find.turns));
}

void put_body(const Store& store, schema::Datagram::Builder out) {
  auto body = out.initStore();
  body.setWantNodes(store.want_nodes);
  body.setCache(store.cache);
  auto records = body.initRecords(static_cast<unsigned>(store.records.size()));
  for (unsigned i = 0; i < store.records.size(); ++i) put(store.records[i], records[i]);
}

void put_body(const Chunk& chunk, schema::Datagram::Builder out) {
  auto body = out.initChunk();
  put(chunk.record, body.initRecord());
  body.setOffset(chunk.offset);
  body.setData(data_of(chunk.data));
}

void put_body(const Fetch& fetch, schema::Datagram::Builder out) {
  auto body = out.initFetch();
  put_bits(body.initKey(4), 0, fetch.key.bytes);
  put_bits(body.initPublisher(4), 0, fetch.publisher);
  body.setSequence(fetch.sequence);
  body.setOffset(fetch.offset);
  body.setSubkey({reinterpret_cast<const std::uint8_t*>(fetch.subkey.data()), fetch.subkey.size()});
}

void put_body(const Probe& probe, schema::Datagram::Builder out) {
  auto body = out.initProbe();
  body.setStage(static_cast<std::uint8_t>(probe.stage));
  body.setPort(probe.port);
  body.setNonce(probe.nonce);
  if (probe.stage == Probe::Stage::kRelay) put_address(body.initTarget(address_words(probe.target)), 0, probe.target);
}

void put_nodes(const std::vector<NodeInfo>& nodes, schema::Reply::Builder out) {
  const auto v4 = static_cast<unsigned>(
      std::count_if(nodes.begin(), nodes.end(), [](const NodeInfo& node) { return node.address.is_v4(); }));
  const auto v6 = static_cast<unsigned>(nodes.size()) - v4;
  WordsOut words4 = v4 != 0 ? out.initNodes4(v4 * 5) : WordsOut();
  WordsOut words6 = v6 != 0 ? out.initNodes6(v6 * 7) : WordsOut();
  unsigned at4 = 0;
  unsigned at6 = 0;
  for (const NodeInfo& node : nodes) {
    const bool is_v4 = node.address.is_v4();
    WordsOut& words = is_v4 ? words4 : words6;
    unsigned& at = is_v4 ? at4 : at6;
    put_bits(words, at, node.id.bytes);
    put_address(words, at + 4, node.address);
    at += 4 + address_words(node.address);
  }
}

void put_body(const Reply& reply, schema::Datagram::Builder out) {
  auto body = out.initReply();
  body.setDoneKeys(reply.done_keys);
  if (reply.observed) put_address(body.initObserved(address_words(*reply.observed)), 0, *reply.observed);
  if (reply.conflict) put_address(body.initConflict(address_words(*reply.conflict)), 0, *reply.conflict);
  if (!reply.nodes.empty()) put_nodes(reply.nodes, body);
  if (!reply.found.empty()) {
    auto found = body.initFound(static_cast<unsigned>(reply.found.size()));
    for (unsigned i = 0; i < reply.found.size(); ++i) {
      found[i].setIndex(reply.found[i].index);
      found[i].setCached(reply.found[i].cached);
      found[i].setTotal(reply.found[i].total);
      found[i].setFrom(reply.found[i].from);
      if (const auto& tags = reply.found[i].tags; !tags.empty()) {
        auto out_tags = found[i].initTags(static_cast<unsigned>(tags.size()));
        for (unsigned j = 0; j < tags.size(); ++j) out_tags.set(j, tags[j]);
      }
      auto records = found[i].initRecords(static_cast<unsigned>(reply.found[i].records.size()));
      for (unsigned j = 0; j < records.size(); ++j) put(reply.found[i].records[j], records[j]);
    }
  }
  if (!reply.acks.empty()) {
    auto acks = body.initAcks(static_cast<unsigned>(reply.acks.size()));
    for (unsigned i = 0; i < acks.size(); ++i) acks[i] = static_cast<std::uint8_t>(reply.acks[i]);
  }
  if (reply.part) {
    auto part = body.initPart();
    part.setOffset(reply.part->offset);
    part.setTotal(reply.part->total);
    part.setData(data_of(reply.part->data));
  }
  if (reply.proof) body.setProof(data_of(*reply.proof));
}

std::size_t padded(std::size_t bytes) noexcept { return (bytes + 7) / 8 * 8; }

}  // namespace

std::size_t record_size(const TravellingRecord& travelling) noexcept {
  const Record& record = travelling.record;
  return 15 * 8 + 64 + padded(record.subkey.size()) + padded(record.value.size()) +
         record.batch_path.size() * sizeof(BatchHash);
}

std::vector<std::uint8_t> proof_message(std::uint64_t transaction, const net::PublicKey& requester) {
  constexpr std::string_view kDomain = "dmoe-dht-proof-1";
  std::vector<std::uint8_t> message(kDomain.begin(), kDomain.end());
  for (unsigned i = 0; i < 8; ++i) message.push_back(static_cast<std::uint8_t>(transaction >> (8 * i)));
  message.insert(message.end(), requester.begin(), requester.end());
  return message;
}

void Buffer::pad_to(std::size_t size) noexcept {
  if (size <= size_) return;
  std::fill(bytes_.begin() + static_cast<std::ptrdiff_t>(size_), bytes_.begin() + static_cast<std::ptrdiff_t>(size), 0);
  size_ = size;
}

bool encode(const Message& message, Buffer& buffer) {
  constexpr std::size_t kScratchWords = 256;  // More than a datagram: an oversized message still is one segment.
  capnp::word scratch[kScratchWords];
  std::memset(scratch, 0, sizeof scratch);
  capnp::MallocMessageBuilder builder(kj::arrayPtr(scratch, kScratchWords));
  auto root = builder.initRoot<schema::Datagram>();
  root.setVersion(1);
  root.setFlags(static_cast<std::uint8_t>((message.client ? 1U : 0U) | (message.prove ? 2U : 0U)));
  root.setTransaction(message.transaction);
  root.setCookie(message.cookie);
  root.setSender0(load(message.sender.data()));
  root.setSender1(load(message.sender.data() + 8));
  root.setSender2(load(message.sender.data() + 16));
  root.setSender3(load(message.sender.data() + 24));
  std::visit([&](const auto& body) { put_body(body, root); }, message.body);

  const auto segments = builder.getSegmentsForOutput();
  if (segments.size() != 1) return false;
  const auto bytes = segments[0].asBytes();
  if (bytes.size() + 8 > kMaxDatagram) return false;
  const std::uint32_t header[2] = {0, static_cast<std::uint32_t>(segments[0].size())};
  std::memcpy(buffer.bytes_.data(), header, 8);
  std::memcpy(buffer.bytes_.data() + 8, bytes.begin(), bytes.size());
  buffer.size_ = bytes.size() + 8;
  return true;
}

}  // namespace dmoe::dht::wire
