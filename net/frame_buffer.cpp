#include "net/frame_buffer.hpp"

#include "net/frame_memory.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace dmoe::net {
namespace {

constexpr std::size_t kSmallest = 8UL * 1024;  ///< A control frame or a row fits without a second allocation.

}  // namespace

FrameBuffer::FrameBuffer(FrameBuffer&& other) noexcept
    : bytes_(std::exchange(other.bytes_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      capacity_(std::exchange(other.capacity_, 0)),
      max_size_(other.max_size_),
      lease_(std::exchange(other.lease_, nullptr)) {}

FrameBuffer& FrameBuffer::operator=(FrameBuffer&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  std::swap(size_, other.size_);
  std::swap(capacity_, other.capacity_);
  std::swap(max_size_, other.max_size_);
  std::swap(lease_, other.lease_);
  return *this;
}

FrameBuffer::~FrameBuffer() { release(); }

FrameBuffer::mutable_buffers_type FrameBuffer::prepare(std::size_t n) {
  if (n > max_size_ - size_) throw std::length_error("frame over the limit");
  if (size_ + n > capacity_) grow(size_ + n);
  return {bytes_ + size_, n};
}

void FrameBuffer::commit(std::size_t n) noexcept { size_ += std::min(n, capacity_ - size_); }

void FrameBuffer::consume(std::size_t n) noexcept {
  n = std::min(n, size_);
  size_ -= n;
  if (size_ > 0) std::memmove(bytes_, bytes_ + n, size_);
}

void FrameBuffer::grow(std::size_t wanted) {
  // A frame in one piece announces its size; doubling is for peers that send it in many.
  const std::size_t doubled = size_ == 0 ? 0 : std::min(2 * size_, max_size_);
  const auto block = allocate_frame(std::max({wanted, doubled, kSmallest}));
  if (size_ > 0) std::memcpy(block.bytes, bytes_, size_);
  if (bytes_ != nullptr) free_frame({bytes_, capacity_});
  bytes_ = block.bytes;
  capacity_ = block.size;
}

void FrameBuffer::release() noexcept {
  if (bytes_ != nullptr) free_frame({std::exchange(bytes_, nullptr), std::exchange(capacity_, 0)});
  size_ = 0;
}

}  // namespace dmoe::net
