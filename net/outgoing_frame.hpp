// A frame on its way to the socket.
#pragma once

#include "net/error.hpp"
#include "net/rpc_message.hpp"

#include <capnp/message.h>
#include <boost/asio/buffer.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

namespace dmoe::net {

/// A buffer sequence that composed operations can copy for nothing; the frame owns what it points to.
class BufferSpan {
 public:
  using value_type = boost::asio::const_buffer;
  using const_iterator = const value_type*;

  BufferSpan(const value_type* first, std::size_t count) noexcept : first_(first), last_(first + count) {}
  const_iterator begin() const noexcept { return first_; }
  const_iterator end() const noexcept { return last_; }

 private:
  const value_type* first_;
  const value_type* last_;
};

/// One message under construction, then a gather list over it: segment table, the builder's own segments, and the
/// tensor storages that its attachments keep alive. Move-only in spirit: held by unique_ptr from builder to socket.
class OutgoingFrame {
 public:
  OutgoingFrame();
  OutgoingFrame(const OutgoingFrame&) = delete;
  OutgoingFrame& operator=(const OutgoingFrame&) = delete;

  schema::Frame::Builder root() { return root_; }
  Attachments& attachments() noexcept { return attachments_; }

  /// Ends building. @return kInvalidArgument naming the size, the limit and the option when over `max_bytes`.
  Result<void> finish(std::size_t max_bytes);

  std::size_t size() const noexcept { return size_; }  ///< Bytes; 0 before finish().
  /// The message alone.
  BufferSpan buffers() const noexcept { return {buffers_.data() + 1, buffers_.size() - 1}; }
  /// The message as one binary WebSocket message (RFC 6455 §5.2). `masked`: as a client's must be. The key is zero, so
  /// that bytes leave as they lie; docs/architecture.md says why that is sound.
  BufferSpan websocket_message(bool masked) noexcept;

 private:
  alignas(8) capnp::word first_segment_[128] = {};  // Spares a control frame the allocation of its segment.
  capnp::MallocMessageBuilder message_;
  schema::Frame::Builder root_;
  Attachments attachments_;
  std::vector<std::uint32_t> table_;
  std::array<std::uint8_t, 14> header_{};              // Of the WebSocket message.
  std::vector<boost::asio::const_buffer> buffers_{1};  // The first is the header's place.
  std::size_t size_ = 0;
};

using OutgoingFramePtr = std::unique_ptr<OutgoingFrame>;

/// Frames up to this size are worth copying into one frame instead of a write of their own.
inline constexpr std::size_t kMergeBytes = 16UL * 1024;
inline constexpr std::size_t kMergedBytes = 128UL * 1024;  ///< A merged frame stops growing here.

/// One frame with the calls (or replies, or cancelled ids) of all `frames`, in order.
/// @pre all finished, of the same kind, small.
OutgoingFramePtr merge(const std::vector<OutgoingFramePtr>& frames);

}  // namespace dmoe::net
