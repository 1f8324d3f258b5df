// Follows the bytes of one direction of a WebSocket connection (RFC 6455): where messages begin, and which they are.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace dmoe::testbed {

class WebSocketCursor {
 public:
  /// A run of bytes that belong together.
  struct Piece {
    std::span<const std::uint8_t> bytes;
    bool begins = false;  ///< A message (or the HTTP head, or a control frame) starts here.
    bool data = false;    ///< Part of a message that carries data.
  };

  /// Takes the next piece off the front of `bytes`. @pre !bytes.empty()
  Piece next(std::span<const std::uint8_t>& bytes) {
    const bool begins = !inside_;
    if (!inside_) start();
    const auto before = bytes;
    if (in_head_) {
      while (!bytes.empty() && in_head_) read_head(take(bytes));
    } else {
      while (!bytes.empty() && header_left_ > 0) read_header(take(bytes));
      if (header_left_ == 0) {
        const auto count = std::min<std::uint64_t>(bytes.size(), payload_left_);
        bytes = bytes.subspan(static_cast<std::size_t>(count));
        payload_left_ -= count;
        inside_ = payload_left_ > 0;
      }
    }
    return {before.first(before.size() - bytes.size()), begins && !continues_, is_data_};
  }

 private:
  static constexpr std::uint8_t kFin = 0x80, kOpcode = 0x0F, kControl = 0x08, kMasked = 0x80, kLength = 0x7F;

  static std::uint8_t take(std::span<const std::uint8_t>& bytes) {
    const auto byte = bytes.front();
    bytes = bytes.subspan(1);
    return byte;
  }

  void start() {
    inside_ = true;
    if (in_head_) return;
    header_left_ = 2;
    header_at_ = 0;
    payload_left_ = 0;
  }

  /// The HTTP head ends with an empty line.
  void read_head(std::uint8_t byte) {
    tail_ = (tail_ << 8U) | byte;
    if (tail_ != 0x0D0A0D0AU) return;
    in_head_ = false;
    inside_ = false;
  }

  void read_header(std::uint8_t byte) {
    const auto at = header_at_++;
    --header_left_;
    if (at == 0) {
      const auto opcode = byte & kOpcode;
      is_data_ = (opcode & kControl) == 0;
      continues_ = is_data_ && opcode == 0;
      return;
    }
    if (at == 1) {
      const unsigned length = byte & kLength;
      length_bytes_ = length == 126 ? 2 : length == 127 ? 8 : 0;
      payload_left_ = length_bytes_ == 0 ? length : 0;
      header_left_ = length_bytes_ + ((byte & kMasked) != 0 ? 4U : 0U);
      return;
    }
    if (at < 2 + length_bytes_) payload_left_ = (payload_left_ << 8U) | byte;
  }

  bool in_head_ = true;
  bool inside_ = false;  ///< Of the head or of a frame.
  bool is_data_ = false;
  bool continues_ = false;  ///< A frame of a message that began before.
  std::uint32_t tail_ = 0;
  unsigned header_left_ = 0;
  unsigned header_at_ = 0;
  unsigned length_bytes_ = 0;
  std::uint64_t payload_left_ = 0;
};

}  // namespace dmoe::testbed
