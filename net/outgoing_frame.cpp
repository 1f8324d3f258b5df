#include "net/outgoing_frame.hpp"

#include <limits>
#include <string>

namespace dmoe::net {
namespace {

constexpr std::size_t kWord = sizeof(capnp::word);

/// The stream framing of Cap'n Proto: count - 1, then each segment's words, padded to a whole word.
std::vector<std::uint32_t> segment_table(kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>> segments) {
  std::vector<std::uint32_t> table((segments.size() + 2) & ~std::size_t{1});
  table[0] = static_cast<std::uint32_t>(segments.size() - 1);
  for (std::size_t i = 0; i < segments.size(); ++i) table[i + 1] = static_cast<std::uint32_t>(segments[i].size());
  return table;
}

template <class List>
std::uint32_t total(const std::vector<OutgoingFramePtr>& frames, List list_of) {
  std::uint32_t count = 0;
  for (const auto& frame : frames) count += list_of(*frame).size();
  return count;
}

template <class List, class Target>
void copy_structs(const std::vector<OutgoingFramePtr>& frames, List list_of, Target target) {
  std::uint32_t at = 0;
  for (const auto& frame : frames) {
    for (const auto item : list_of(*frame)) target.setWithCaveats(at++, item);
  }
}

}  // namespace

OutgoingFrame::OutgoingFrame()
    : message_(kj::arrayPtr(first_segment_, std::size(first_segment_))), root_(message_.initRoot<schema::Frame>()) {}

Result<void> OutgoingFrame::finish(std::size_t max_bytes) {
  const auto segments = message_.getSegmentsForOutput();
  table_ = segment_table(segments);
  buffers_.resize(1);
  buffers_.reserve(segments.size() + 2);
  buffers_.emplace_back(table_.data(), table_.size() * sizeof(table_[0]));
  size_ = buffers_.back().size();
  for (const auto& segment : segments) {
    buffers_.emplace_back(segment.begin(), segment.size() * kWord);
    size_ += segment.size() * kWord;
  }
  if (size_ <= max_bytes) return {};
  return Error{Errc::kInvalidArgument,
               "a frame of " + std::to_string(size_) + " bytes is over the limit of " + std::to_string(max_bytes) +
                   " bytes; send fewer rows, or raise max_frame_bytes on both sides",
               {}};
}

BufferSpan OutgoingFrame::websocket_message(bool masked) noexcept {
  constexpr std::uint8_t kFinalBinary = 0x82;
  constexpr std::uint8_t kMasked = 0x80;
  constexpr std::size_t kMaskingKey = 4;
  // The length in 7 bits, or 126 and 16 bits, or 127 and 64 bits.
  const std::size_t extended = size_ < 126 ? 0 : size_ <= 0xFFFF ? 2 : 8;
  const auto length = static_cast<std::uint8_t>(extended == 0 ? size_ : extended == 2 ? 126 : 127);
  header_.fill(0);
  header_[0] = kFinalBinary;
  header_[1] = static_cast<std::uint8_t>(length | (masked ? kMasked : 0));
  for (std::size_t i = 0; i < extended; ++i) {
    header_.at(2 + i) = static_cast<std::uint8_t>(size_ >> (8 * (extended - 1 - i)));
  }
  buffers_.front() = boost::asio::const_buffer(header_.data(), 2 + extended + (masked ? kMaskingKey : 0));
  return {buffers_.data(), buffers_.size()};
}

OutgoingFramePtr merge(const std::vector<OutgoingFramePtr>& frames) {
  auto merged = std::make_unique<OutgoingFrame>();
  const auto root = frames.front()->root().which();
  if (root == schema::Frame::CALLS) {
    const auto calls = [](OutgoingFrame& frame) { return frame.root().asReader().getCalls(); };
    copy_structs(frames, calls, merged->root().initCalls(total(frames, calls)));
  } else if (root == schema::Frame::REPLIES) {
    const auto replies = [](OutgoingFrame& frame) { return frame.root().asReader().getReplies(); };
    copy_structs(frames, replies, merged->root().initReplies(total(frames, replies)));
  } else {
    const auto ids = [](OutgoingFrame& frame) { return frame.root().asReader().getCancel(); };
    auto target = merged->root().initCancel(total(frames, ids));
    std::uint32_t at = 0;
    for (const auto& frame : frames) {
      for (const auto id : ids(*frame)) target.set(at++, id);
    }
  }
  // Each part was under the limit, and the sum is bounded by kMergedBytes.
  (void)merged->finish(std::numeric_limits<std::size_t>::max());
  return merged;
}

}  // namespace dmoe::net
