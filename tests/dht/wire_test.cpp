// Datagrams from anybody: what is right comes through unchanged, what is not costs nothing.
#include "dht/wire.hpp"

#include "tests/sim/world.hpp"
#include "tests/support/catch.hpp"

#include <random>

namespace dmoe::dht::wire {
namespace {

using namespace std::chrono_literals;

std::vector<Message> samples(std::mt19937_64& random) {
  const sim::CheapSigner signer(random());
  const auto some_key = [&] { return Key::of(std::to_string(random())); };
  const auto node = [&](bool v4) {
    Address address = Address::v4(static_cast<std::uint32_t>(random() | 0x01000000U), 4040);
    if (!v4) address.ip = {0x20, 0x01, 0x0D, 0xB8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
    return NodeInfo{NodeId{some_key().bytes}, address};
  };
  const auto record = [&](std::size_t size) {
    TravellingRecord travelling;
    travelling.record = {
        some_key(), signer.public_key(),       random(), 60'000, false, "sub", std::vector<std::uint8_t>(size, 7),
        3,          std::vector<BatchHash>(5), {}};
    travelling.remaining_ms = 50'000;
    travelling.value_size = static_cast<std::uint32_t>(size);
    return travelling;
  };
  Reply reply;
  reply.done_keys = 5;
  reply.observed = node(true).address;
  reply.conflict = node(false).address;
  for (int i = 0; i < 5; ++i) reply.nodes.push_back(node(i < 3));
  reply.found = {{0, false, 7, {record(20)}}, {2, true, 1, {record(30)}}};
  reply.found[0].from = 3;
  for (int i = 0; i < 7; ++i) reply.found[0].tags.push_back(static_cast<std::uint16_t>(random()));
  reply.acks = {Ack::kStored, Ack::kUnreachable};
  reply.proof = net::Signature{};
  Reply part;
  part.part = Part{896, 2'000, std::vector<std::uint8_t>(896, 9)};
  TravellingRecord header = record(2'000);
  header.record.value.clear();
  std::vector<Message> messages(8);
  messages[0].body = Ping{};
  messages[1].body = Find{{some_key(), some_key()}, 8, true, true, 0, {128, 7}};
  messages[2].body = Store{{record(100), record(200)}, true};
  messages[3].body = Chunk{header, 560, std::vector<std::uint8_t>(560, 1)};
  messages[4].body = Fetch{some_key(), signer.public_key(), "sub", 9, 896};
  messages[5].body = Probe{Probe::Stage::kRelay, 0, 77, node(false).address};
  messages[6].body = reply;
  messages[7].body = part;
  for (Message& message : messages) {
    message.transaction = random();
    message.cookie = random();
    message.sender = signer.public_key();
  }
  return messages;
}

TEST_CASE("A message read back and written again is the same bytes", "[dht][wire]") {
  std::mt19937_64 random(test::seed());
  for (const Message& message : samples(random)) {
    Buffer first;
    REQUIRE(encode(message, first));
    const auto read = decode(first.bytes());
    REQUIRE(read.has_value());
    Buffer second;
    REQUIRE(encode(*read, second));
    CHECK(std::equal(first.bytes().begin(), first.bytes().end(), second.bytes().begin(), second.bytes().end()));
    CHECK(read->body.index() == message.body.index());
  }
}

TEST_CASE("Budgets are upper bounds of what a message takes", "[dht][wire]") {
  std::mt19937_64 random(test::seed());
  for (const Message& message : samples(random)) {
    Buffer buffer;
    REQUIRE(encode(message, buffer));
    if (const auto* store = std::get_if<Store>(&message.body)) {
      std::size_t budget = kRequestOverhead;
      for (const auto& record : store->records) budget += record_size(record);
      CHECK(buffer.bytes().size() <= budget);
    }
    if (const auto* reply = std::get_if<Reply>(&message.body); reply != nullptr && !reply->part) {
      std::size_t budget = kReplyOverhead;
      for (const auto& node : reply->nodes) budget += node_size(node.address);
      for (const auto& found : reply->found) {
        budget += kKeyRecordsOverhead + (found.tags.size() * sizeof(std::uint16_t) + 7) / 8 * 8;
        for (const auto& record : found.records) budget += record_size(record);
      }
      CHECK(buffer.bytes().size() <= budget);
    }
  }
}

TEST_CASE("Tags that are not one for each record are refused", "[dht][wire]") {
  Reply reply;
  reply.done_keys = 1;
  reply.found = {{0, false, 70, {}}};
  Message message;
  for (const std::size_t tags : {std::size_t{0}, std::size_t{69}, std::size_t{70}}) {
    reply.found[0].tags.assign(tags, 5);
    message.body = reply;
    Buffer buffer;
    REQUIRE(encode(message, buffer));
    CHECK(decode(buffer.bytes()).has_value() == (tags == 0));  // Seventy are more than a reply may have.
  }
  reply.found[0] = {0, false, 3, {}, 0, {1, 2, 3}};
  message.body = reply;
  Buffer buffer;
  REQUIRE(encode(message, buffer));
  CHECK(decode(buffer.bytes()).has_value());
}

TEST_CASE("Bytes changed at random never do harm", "[dht][wire][fuzz]") {
  std::mt19937_64 random(test::seed());
  std::size_t accepted = 0;
  for (int round = 0; round < 3'000; ++round) {
    for (const Message& message : samples(random)) {
      Buffer buffer;
      REQUIRE(encode(message, buffer));
      std::vector<std::uint8_t> bytes(buffer.bytes().begin(), buffer.bytes().end());
      for (std::uint64_t i = random() % 6; i != 0; --i)
        bytes[random() % bytes.size()] = static_cast<std::uint8_t>(random());
      if (random() % 4 == 0) bytes.resize(random() % (bytes.size() + 1));
      if (const auto read = decode(bytes)) {
        ++accepted;
        Buffer again;
        (void)encode(*read, again);
      }
    }
  }
  CHECK(accepted > 0);
}

TEST_CASE("A node survives garbage and answers no stranger with more than it sent", "[dht][sim][fuzz]") {
  sim::World world(test::seed());
  world.grow(10);
  sim::Host& attacker = world.add_host();
  std::size_t received = 0;
  std::size_t largest = 0;
  attacker.on_receive([&](const Address&, std::span<const std::uint8_t> datagram) {
    // Pings that ask for the attacker's own proof are requests, not answers.
    const auto message = decode(datagram);
    if (!message || !std::holds_alternative<Reply>(message->body)) return;
    ++received;
    largest = std::max(largest, datagram.size());
  });
  std::mt19937_64 random(test::seed());
  for (int round = 0; round < 200; ++round) {
    for (const Message& message : samples(random)) {
      Buffer buffer;
      REQUIRE(encode(message, buffer));
      std::vector<std::uint8_t> bytes(buffer.bytes().begin(), buffer.bytes().end());
      if (round % 2 == 1) bytes[random() % bytes.size()] ^= static_cast<std::uint8_t>(1U << random() % 8);
      attacker.send(world.host(1).address, bytes);
      largest = 0;
      world.run_for(2s);
      CHECK(largest <= bytes.size());
    }
  }
  CHECK(received > 0);
  CHECK(world.host(1).store().stats().records == 0);
  CHECK(world.store(world.host(2), {Key::of("k"), {}, {1}, 60s, false}).has_value());
}

}  // namespace
}  // namespace dmoe::dht::wire
