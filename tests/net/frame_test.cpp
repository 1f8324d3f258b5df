// Frames in memory: buffers, budgets, alignment, merging, and bytes that were tampered with.
#include "net/frame_buffer.hpp"
#include "net/outgoing_frame.hpp"
#include "net/received_frame.hpp"
#include "tests/net/rpc_fixture.hpp"
#include "tests/support/catch.hpp"

#include <capnp/orphan.h>
#include <boost/asio/buffer.hpp>

#include <cstring>
#include <random>

using namespace dmoe;
using namespace dmoe::test;
using net::FrameBuffer;
using net::OutgoingFrame;
using net::ReceivedFrame;
using From = ReceivedFrame::From;

namespace {

constexpr std::size_t kCap = net::kDefaultMaxFrameBytes;

FrameBuffer buffer_of(std::string_view bytes, std::size_t piece = kCap) {
  FrameBuffer buffer(kCap);
  while (!bytes.empty()) {
    const auto part = bytes.substr(0, piece);
    const auto room = buffer.prepare(part.size());
    std::memcpy(room.data(), part.data(), part.size());
    buffer.commit(part.size());
    bytes.remove_prefix(part.size());
  }
  return buffer;
}

std::string flat_bytes(const OutgoingFrame& frame) {
  std::string bytes;
  for (const auto& part : frame.buffers()) bytes.append(static_cast<const char*>(part.data()), part.size());
  return bytes;
}

std::unique_ptr<OutgoingFrame> forward_frame(std::uint64_t id, const std::string& bytes) {
  auto frame = std::make_unique<OutgoingFrame>();
  auto call = frame->root().initCalls(1)[0];
  call.setId(id);
  fill_forward(call, "ffn.3.17", id, bytes);
  REQUIRE(frame->finish(kCap).has_value());
  return frame;
}

/// A forward call whose input is `size` bytes outside of the message.
std::string frame_with_external(std::size_t size) {
  const std::vector<std::uint64_t> payload(size / 8, 0x0102030405060708ULL);
  OutgoingFrame frame;
  auto tensor = frame.root().initCalls(1)[0].initForward().initInputs(1)[0];
  tensor.adoptData(capnp::Orphanage::getForMessageContaining(tensor).referenceExternalData(
      kj::arrayPtr(reinterpret_cast<const kj::byte*>(payload.data()), payload.size() * 8)));
  REQUIRE(frame.finish(kCap).has_value());
  return flat_bytes(frame);
}

std::size_t touch_all(const ReceivedFrame& frame) {
  std::size_t bytes = 0;
  if (!frame.root().isCalls()) return 0;
  for (const auto call : frame.root().getCalls()) {
    if (!call.isForward()) continue;
    bytes += call.getForward().getUid().size();
    for (const auto tensor : call.getForward().getInputs()) {
      for (const auto size : tensor.getShape()) bytes += static_cast<std::size_t>(size != 0);
      for (const auto byte : tensor.getData()) bytes += byte != 0;
    }
  }
  return bytes;
}

}  // namespace

TEST_CASE("a frame buffer keeps its bytes while it grows and honours its cap", "[frame]") {
  FrameBuffer buffer(100'000);
  std::string expected;
  std::mt19937_64 random(seed());
  while (expected.size() + 3'000 < 100'000) {
    std::string part(random() % 3'000, static_cast<char>(random()));
    std::memcpy(buffer.prepare(part.size() + 7).data(), part.data(), part.size());
    buffer.commit(part.size());
    expected += part;
  }
  CHECK(std::string(static_cast<const char*>(buffer.data().data()), buffer.size()) == expected);
  CHECK(reinterpret_cast<std::uintptr_t>(buffer.bytes()) % 64 == 0);
  CHECK_THROWS_AS(buffer.prepare(100'001 - buffer.size()), std::length_error);
  CHECK_THROWS_AS(buffer.prepare(~std::size_t{0}), std::length_error);
  buffer.consume(10);
  CHECK(std::memcmp(buffer.bytes(), expected.data() + 10, buffer.size()) == 0);
  const FrameBuffer moved = std::move(buffer);
  CHECK(moved.size() == expected.size() - 10);
}

TEST_CASE("a17 frames that arrive in pieces of any size are aligned and whole", "[frame][a17]") {
  const auto sent = flat_bytes(*forward_frame(7, "thirteen byte"));
  for (std::size_t piece = 1; piece <= 16; ++piece) {
    const auto frame = ReceivedFrame::parse(buffer_of(sent, piece), From::kClient);
    REQUIRE(frame.has_value());
    const auto forward = (*frame)->root().getCalls()[0].getForward();
    CHECK(std::string(forward.getUid().cStr()) == "ffn.3.17");
    const auto data = forward.getInputs()[0].getData();
    CHECK(std::string(reinterpret_cast<const char*>(data.begin()), data.size()) == "thirteen byte");
    CHECK(reinterpret_cast<std::uintptr_t>(data.begin()) % 8 == 0);
  }
}

TEST_CASE("a15 large fields may be read again and again", "[frame][a15]") {
  for (const std::size_t size : {60UL << 20U, 200UL << 20U}) {
    const auto frame = ReceivedFrame::parse(buffer_of(frame_with_external(size)), From::kClient);
    REQUIRE(frame.has_value());
    std::size_t total = 0;
    for (int i = 0; i < 100; ++i) {
      total += (*frame)->root().getCalls()[0].getForward().getInputs()[0].getData().size();
    }
    CHECK(total == 100 * size);
  }
}

TEST_CASE("an outgoing frame points at the bytes of its tensors", "[frame]") {
  const std::vector<std::uint64_t> payload(1'024, 42);
  OutgoingFrame frame;
  auto tensor = frame.root().initReplies(1)[0].initForward(1)[0];
  tensor.adoptData(capnp::Orphanage::getForMessageContaining(tensor).referenceExternalData(
      kj::arrayPtr(reinterpret_cast<const kj::byte*>(payload.data()), payload.size() * 8)));
  REQUIRE(frame.finish(kCap).has_value());
  std::size_t total = 0;
  bool found = false;
  for (const auto& part : frame.buffers()) {
    total += part.size();
    found = found || (part.data() == payload.data() && part.size() == payload.size() * 8);
  }
  CHECK(found);
  CHECK(total == frame.size());
}

TEST_CASE("a frame over the limit names size limit and option", "[frame][a12]") {
  OutgoingFrame frame;
  frame.root().initReplies(1)[0].initForward(1)[0].initData(100'000);
  const auto finished = frame.finish(65'536);
  REQUIRE(finished.has_error());
  CHECK(finished.error().code == Errc::kInvalidArgument);
  CHECK(finished.error().message.find("65536") != std::string::npos);
  CHECK(finished.error().message.find(std::to_string(frame.size())) != std::string::npos);
  CHECK(finished.error().message.find("max_frame_bytes") != std::string::npos);
}

TEST_CASE("merged frames hold every call in order", "[frame]") {
  std::vector<net::OutgoingFramePtr> frames;
  for (std::uint64_t id = 0; id < 20; ++id) frames.push_back(forward_frame(id, std::string(id * 10, 'a')));
  const auto merged = net::merge(frames);
  const auto received = ReceivedFrame::parse(buffer_of(flat_bytes(*merged)), From::kClient);
  REQUIRE(received.has_value());
  const auto calls = (*received)->root().getCalls();
  REQUIRE(calls.size() == 20);
  for (unsigned i = 0; i < 20; ++i) {
    CHECK(calls[i].getId() == i);
    CHECK(calls[i].getForward().getInputs()[0].getData().size() == i * 10);
  }
}

TEST_CASE("errors travel with code text and time to retry", "[frame]") {
  capnp::MallocMessageBuilder message;
  auto builder = message.initRoot<net::schema::Error>();
  net::write_error({Errc::kOverloaded, std::string(5'000, 'x'), std::chrono::milliseconds{70}}, builder);
  const auto read = net::read_error(builder.asReader());
  CHECK(read.code == Errc::kOverloaded);
  CHECK(read.message.size() == 1'024);
  CHECK(read.retry_after == std::chrono::milliseconds{70});
  builder.setCode(999);
  builder.setMessage("line\nforged \x1b[31m");
  const auto hostile = net::read_error(builder.asReader());
  CHECK(hostile.code == Errc::kInternal);
  CHECK(hostile.message == "line forged  [31m");
}

TEST_CASE("f6 frames with any bytes changed are refused or read without harm", "[frame][f6]") {
  std::mt19937_64 random(seed());
  const std::vector<std::string> samples = {flat_bytes(*forward_frame(1, "a row of bytes")), frame_with_external(512)};
  std::size_t accepted = 0;
  std::size_t touched = 0;
  for (int round = 0; round < 20'000; ++round) {
    auto bytes = samples[random() % samples.size()];
    for (std::size_t changes = 1 + random() % 6; changes > 0; --changes) {
      // Mostly where pointers are; sometimes a whole word.
      const std::size_t at = random() % std::min<std::size_t>(bytes.size(), 160);
      bytes[at] = static_cast<char>(random() % 4 == 0 ? random()
                                                      : static_cast<unsigned char>(bytes[at]) ^ (1U << (random() % 8)));
    }
    if (random() % 8 == 0) bytes.resize(random() % bytes.size());
    const auto frame = ReceivedFrame::parse(buffer_of(bytes), random() % 2 == 0 ? From::kClient : From::kServer);
    if (frame.has_error()) {
      CHECK_FALSE(frame.error().message.empty());
      continue;
    }
    ++accepted;
    CHECK_NOTHROW(touched += touch_all(**frame));
  }
  CHECK(accepted > 0);
  CHECK(touched > 0);
}
