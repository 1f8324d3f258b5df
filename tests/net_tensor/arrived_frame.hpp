// A frame as it arrives at the other end.
#pragma once

#include "net/outgoing_frame.hpp"
#include "net/received_frame.hpp"
#include "tests/support/catch.hpp"

#include <cstring>
#include <memory>
#include <utility>

namespace dmoe::test {

inline std::shared_ptr<const net::ReceivedFrame> as_arrived(net::OutgoingFrame& frame) {
  REQUIRE(frame.finish(net::kDefaultMaxFrameBytes).has_value());
  net::FrameBuffer buffer(net::kDefaultMaxFrameBytes);
  for (const auto& part : frame.buffers()) {
    std::memcpy(buffer.prepare(part.size()).data(), part.data(), part.size());
    buffer.commit(part.size());
  }
  auto received = net::ReceivedFrame::parse(std::move(buffer), net::ReceivedFrame::From::kServer);
  INFO((received.has_error() ? received.error().message : ""));
  REQUIRE(received.has_value());
  return *received;
}

}  // namespace dmoe::test
