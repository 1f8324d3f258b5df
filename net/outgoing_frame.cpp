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
  buffers_.clear();
  buffers_.reserve(segments.size() + 1);
  buffers_.emplace_back(table_.data(), table_.size() * sizeof(table_[0]));
  size_ = buffers_.front().size();
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
