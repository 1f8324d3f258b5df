// A frame from a peer: hostile bytes on the way in, checked readers on the way out.
#pragma once

#include "net/error.hpp"
#include "net/frame_buffer.hpp"
#include "net/rpc_message.hpp"

#include <capnp/serialize.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace dmoe::net {

inline constexpr std::uint32_t kMaxMessagesPerFrame = 8'192;  ///< Calls, replies or cancelled ids.

class ReceivedFrame {
 public:
  /// Which side sent it: calls and cancels go one way, replies the other.
  enum class From { kClient, kServer };

  /// Takes over the bytes and follows every pointer in them once, so that no later read of the frame throws.
  /// @return kInvalidArgument saying what is wrong; the sender then loses its connection.
  static Result<std::shared_ptr<const ReceivedFrame>> parse(FrameBuffer bytes, From from);

  explicit ReceivedFrame(FrameBuffer bytes) : bytes_(std::move(bytes)) {}
  ReceivedFrame(const ReceivedFrame&) = delete;
  ReceivedFrame& operator=(const ReceivedFrame&) = delete;

  schema::Frame::Reader root() const noexcept { return root_; }
  std::size_t size() const noexcept { return bytes_.size(); }
  bool counted() const noexcept { return bytes_.counted(); }  ///< By the server's FrameBudget.

 private:
  void read();

  FrameBuffer bytes_;
  std::optional<capnp::FlatArrayMessageReader> message_;
  schema::Frame::Reader root_;
};

/// The ids of the calls in a frame of which perhaps only the beginning is there; none in a frame of another kind.
/// Nothing: it does not tell. For calls that are answered although their bytes are not going to be read.
std::optional<std::vector<std::uint64_t>> call_ids_in(const FrameBuffer& beginning);

}  // namespace dmoe::net
