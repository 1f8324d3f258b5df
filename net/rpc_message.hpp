// Frames on their way out and in, and the memory they point into.
#pragma once

#include "net/error.hpp"
#include "net/schema/rpc.capnp.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

namespace dmoe::net {

/// Named in the WebSocket handshake (Sec-WebSocket-Protocol); peers of another version are refused by name.
inline constexpr std::string_view kProtocolName = "dmoe.1";
inline constexpr std::string_view kRpcPath = "/rpc";  ///< Where an upgrade to WebSocket is accepted.

inline constexpr std::size_t kDefaultMaxFrameBytes = 256UL * 1024 * 1024;

/// Keeps alive what the external segments of an outgoing message point into (tensor storages), until it is sent.
class Attachments {
 public:
  void keep(std::shared_ptr<const void> owner) { owners_.push_back(std::move(owner)); }

 private:
  std::vector<std::shared_ptr<const void>> owners_;
};

/// A received frame: 8-byte aligned bytes and the checked reader over them. Immutable; tensors decoded from it share
/// ownership of it, so a payload byte is not copied after it left the socket.
class ReceivedFrame;

/// One reply of a received frame. Copyable; keeps the frame alive.
class IncomingReply {
 public:
  IncomingReply(std::shared_ptr<const ReceivedFrame> frame, schema::Reply::Reader reader)
      : frame_(std::move(frame)), reader_(reader) {}

  schema::Reply::Reader reader() const noexcept { return reader_; }
  std::shared_ptr<const void> frame() const noexcept { return frame_; }

 private:
  std::shared_ptr<const ReceivedFrame> frame_;
  schema::Reply::Reader reader_;
};

/// Writes `error` as the wire has it.
void write_error(const Error& error, schema::Error::Builder builder);
/// Reads an error from a peer: an unknown code becomes kInternal, the text is cut at 1,024 bytes.
Error read_error(schema::Error::Reader reader);

}  // namespace dmoe::net
