#include "net/received_frame.hpp"

#include <kj/exception.h>

#include <exception>
#include <stdexcept>
#include <string>

namespace dmoe::net {
namespace {

constexpr std::size_t kMaxSegments = 16'384;  ///< Each large tensor is a segment of its own.
constexpr std::size_t kMaxTensors = 1'024;    ///< In one list; the codec's own limit is lower.
constexpr std::size_t kMaxText = 4'096;       ///< Bytes of any text in a frame.
constexpr int kNestingLimit = 16;             ///< Frame to tensor data is 8 deep.
/// How often a frame's bytes may be visited: logging, checking and copying touch the same field again and again, and
/// each touch counts. Cap'n Proto's default of 64 MiB would fail a 60 MiB tensor at the second touch.
constexpr std::uint64_t kTraversalFactor = 256;
constexpr std::uint64_t kTraversalBase = 64UL * 1024;  ///< Words.

using Failure = std::runtime_error;

capnp::ReaderOptions options_for(std::size_t bytes) {
  capnp::ReaderOptions options;
  options.traversalLimitInWords = kTraversalBase + bytes / sizeof(capnp::word) * kTraversalFactor;
  options.nestingLimit = kNestingLimit;
  return options;
}

std::uint32_t word32(const std::uint8_t* at) {
  return at[0] | at[1] << 8U | at[2] << 16U | static_cast<std::uint32_t>(at[3]) << 24U;
}

/// The segment table is read before Cap'n Proto allocates from it.
kj::ArrayPtr<const capnp::word> words_of(const FrameBuffer& bytes) {
  if (bytes.size() < sizeof(capnp::word) || bytes.size() % sizeof(capnp::word) != 0) {
    throw Failure("a frame of " + std::to_string(bytes.size()) + " bytes is not a whole number of words");
  }
  const auto* table = bytes.bytes();
  const std::uint32_t segments = word32(table) + 1;
  if (segments == 0 || segments > kMaxSegments) {
    throw Failure("a frame of " + std::to_string(segments) + " segments is over the limit of " +
                  std::to_string(kMaxSegments));
  }
  return {reinterpret_cast<const capnp::word*>(table), bytes.size() / sizeof(capnp::word)};
}

/// Follows every pointer of a message once and adds up what its tensors claim to hold.
class Checker {
 public:
  explicit Checker(std::size_t frame_bytes) : frame_bytes_(frame_bytes) {}

  void check(schema::Frame::Reader frame, ReceivedFrame::From from) {
    const bool from_client = from == ReceivedFrame::From::kClient;
    switch (frame.which()) {
      case schema::Frame::CALLS:
        if (!from_client) throw Failure("a server sent calls");
        for (const auto call : bounded(frame.getCalls(), kMaxMessagesPerFrame, "calls")) check(call);
        return;
      case schema::Frame::REPLIES:
        if (from_client) throw Failure("a client sent replies");
        for (const auto reply : bounded(frame.getReplies(), kMaxMessagesPerFrame, "replies")) check(reply);
        return;
      case schema::Frame::CANCEL:
        if (!from_client) throw Failure("a server sent a cancel");
        bounded(frame.getCancel(), kMaxMessagesPerFrame, "cancelled ids");
        return;
    }
    throw Failure("a frame of a kind that protocol " + std::string(kProtocolName) + " does not have");
  }

 private:
  template <class List>
  static List bounded(List list, std::size_t limit, const char* what) {
    if (list.size() <= limit) return list;
    throw Failure(std::to_string(list.size()) + " " + what + " are over the limit of " + std::to_string(limit));
  }

  static void check(capnp::Text::Reader text) {
    if (text.size() > kMaxText) throw Failure("a text of " + std::to_string(text.size()) + " bytes");
  }

  void check(capnp::List<schema::Tensor>::Reader tensors) {
    for (const auto tensor : bounded(tensors, kMaxTensors, "tensors")) {
      bounded(tensor.getShape(), kMaxTensors, "dimensions");
      claimed_ += tensor.getData().size();
      // Pointers may share a target: 64 tensors over the same 256 MiB would become 16 GiB once they are batched.
      if (claimed_ > frame_bytes_) throw Failure("tensors that claim more bytes than their frame has");
    }
  }

  static void check(capnp::List<schema::TensorSpec>::Reader specs) {
    for (const auto spec : bounded(specs, kMaxTensors, "tensor descriptions")) {
      bounded(spec.getShape(), kMaxTensors, "dimensions");
    }
  }

  void check(schema::Call::Reader call) {
    switch (call.which()) {
      case schema::Call::INFO: check(call.getInfo().getUid()); return;
      case schema::Call::FORWARD:
        check(call.getForward().getUid());
        check(call.getForward().getInputs());
        return;
      case schema::Call::BACKWARD:
        check(call.getBackward().getUid());
        check(call.getBackward().getInputs());
        check(call.getBackward().getGradOutputs());
        return;
      case schema::Call::PROGRESS: bounded(call.getProgress(), kMaxMessagesPerFrame, "ids asked about"); return;
    }  // A kind that a newer peer knows is answered, not punished.
  }

  void check(schema::Reply::Reader reply) {
    switch (reply.which()) {
      case schema::Reply::ERROR: check(reply.getError().getMessage()); return;
      case schema::Reply::INFO:
        check(reply.getInfo().getUid());
        check(reply.getInfo().getArchitecture());
        check(reply.getInfo().getInputs());
        check(reply.getInfo().getOutputs());
        bounded(reply.getInfo().getCompressions(), kMaxTensors, "compressions");
        return;
      case schema::Reply::FORWARD: check(reply.getForward()); return;
      case schema::Reply::BACKWARD: check(reply.getBackward()); return;
      case schema::Reply::PROGRESS: bounded(reply.getProgress(), kMaxMessagesPerFrame, "ids"); return;
    }
  }

  std::size_t frame_bytes_;
  std::size_t claimed_ = 0;
};

/// The segments that lie completely in `bytes`, from the first on.
std::vector<kj::ArrayPtr<const capnp::word>> whole_segments(const FrameBuffer& bytes) {
  std::vector<kj::ArrayPtr<const capnp::word>> whole;
  if (bytes.size() < sizeof(capnp::word)) return whole;
  const std::uint64_t count = std::uint64_t{word32(bytes.bytes())} + 1;
  if (count > kMaxSegments) return whole;
  std::uint64_t at = (count + 2) / 2 * sizeof(capnp::word);  // The table: the count and the sizes, in whole words.
  if (at > bytes.size()) return whole;
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t words = word32(bytes.bytes() + 4 * (i + 1));
    if (words * sizeof(capnp::word) > bytes.size() - at) break;
    whole.emplace_back(reinterpret_cast<const capnp::word*>(bytes.bytes() + at), words);
    at += words * sizeof(capnp::word);
  }
  return whole;
}

Error malformed(std::string text) { return {Errc::kInvalidArgument, std::move(text), {}}; }

}  // namespace

void ReceivedFrame::read() {
  const auto words = words_of(bytes_);
  message_.emplace(words, options_for(bytes_.size()));
  if (message_->getEnd() != words.end()) throw Failure("bytes after the end of the message");
  root_ = message_->getRoot<schema::Frame>();
}

std::optional<std::vector<std::uint64_t>> call_ids_in(const FrameBuffer& beginning) {
  try {
    const auto segments = whole_segments(beginning);
    if (segments.empty()) return std::nullopt;
    capnp::SegmentArrayMessageReader message(kj::arrayPtr(segments.data(), segments.size()),
                                             options_for(beginning.size()));
    const auto frame = message.getRoot<schema::Frame>();
    std::vector<std::uint64_t> ids;
    if (!frame.isCalls()) return ids;
    for (const auto call : frame.getCalls()) {
      if (ids.size() == kMaxMessagesPerFrame) break;
      ids.push_back(call.getId());
    }
    return ids;
  } catch (const kj::Exception&) {  // It lies, or the list is among what is missing.
    return std::nullopt;
  }
}

Result<std::shared_ptr<const ReceivedFrame>> ReceivedFrame::parse(FrameBuffer bytes, From from) {
  try {
    auto frame = std::make_shared<ReceivedFrame>(std::move(bytes));
    frame->read();
    Checker(frame->size()).check(frame->root_, from);
    return std::shared_ptr<const ReceivedFrame>(std::move(frame));
  } catch (const kj::Exception& failure) {
    return malformed(failure.getDescription().cStr());
  } catch (const std::exception& failure) {
    return malformed(failure.what());
  }
}

}  // namespace dmoe::net
