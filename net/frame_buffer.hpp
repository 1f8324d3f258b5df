// Where a frame's bytes land: read from the socket once, owned by the tensors ever after.
#pragma once

#include <boost/asio/buffer.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace dmoe::net {

/// A Beast DynamicBuffer over one 64-byte aligned allocation whose pages the kernel commits only when bytes arrive:
/// a peer that announces a large frame and sends nothing costs address space, not memory.
class FrameBuffer {
 public:
  using const_buffers_type = boost::asio::const_buffer;
  using mutable_buffers_type = boost::asio::mutable_buffer;

  explicit FrameBuffer(std::size_t max_size) noexcept : max_size_(max_size) {}
  FrameBuffer(FrameBuffer&& other) noexcept;
  FrameBuffer& operator=(FrameBuffer&& other) noexcept;
  ~FrameBuffer();

  std::size_t size() const noexcept { return size_; }
  std::size_t max_size() const noexcept { return max_size_; }
  std::size_t capacity() const noexcept { return capacity_; }
  const_buffers_type data() const noexcept { return {bytes_, size_}; }
  const std::uint8_t* bytes() const noexcept { return bytes_; }

  /// Room for `n` more bytes. Throws std::length_error beyond max_size (Beast turns it into buffer_overflow).
  mutable_buffers_type prepare(std::size_t n);
  void commit(std::size_t n) noexcept;
  void consume(std::size_t n) noexcept;

  /// Keeps `lease` until the memory is given back.
  void hold(std::shared_ptr<const void> lease) noexcept { lease_ = std::move(lease); }
  /// Whether a budget counts these bytes.
  bool counted() const noexcept { return lease_ != nullptr; }

 private:
  void grow(std::size_t capacity);
  void release() noexcept;

  std::uint8_t* bytes_ = nullptr;
  std::size_t size_ = 0;
  std::size_t capacity_ = 0;
  std::size_t max_size_;
  std::shared_ptr<const void> lease_;  // Of whatever kind of budget: shared with nobody here.
};

}  // namespace dmoe::net
