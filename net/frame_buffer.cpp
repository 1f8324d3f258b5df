#include "net/frame_buffer.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

namespace dmoe::net {
namespace {

constexpr std::size_t kSmallest = 8UL * 1024;         ///< A control frame or a row fits without a second allocation.
constexpr std::size_t kMapFrom = 1024UL * 1024;       ///< From here pages are mapped, so untouched ones cost nothing.
constexpr std::size_t kHugePage = 2UL * 1024 * 1024;  ///< x86-64 and arm64 with 4 KiB base pages.
constexpr std::align_val_t kAlignment{64};            ///< A cache line; Cap'n Proto needs 8.

std::size_t round_up(std::size_t n, std::size_t unit) { return (n + unit - 1) / unit * unit; }

std::uint8_t* map_pages(std::size_t size) {
  void* pages = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) throw std::bad_alloc();
  // First touch of 4 KiB pages costs about as much as the copy out of the socket; huge pages make it cheap.
  if (size >= 2 * kHugePage) ::madvise(pages, size, MADV_HUGEPAGE);
  return static_cast<std::uint8_t*>(pages);
}

std::uint8_t* allocate(std::size_t size) {
  return size >= kMapFrom ? map_pages(size) : static_cast<std::uint8_t*>(::operator new(size, kAlignment));
}

void deallocate(std::uint8_t* bytes, std::size_t size) noexcept {
  if (bytes == nullptr) return;
  if (size >= kMapFrom) {
    ::munmap(bytes, size);
  } else {
    ::operator delete(bytes, kAlignment);
  }
}

}  // namespace

FrameBuffer::FrameBuffer(FrameBuffer&& other) noexcept
    : bytes_(std::exchange(other.bytes_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      capacity_(std::exchange(other.capacity_, 0)),
      max_size_(other.max_size_) {}

FrameBuffer& FrameBuffer::operator=(FrameBuffer&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  std::swap(size_, other.size_);
  std::swap(capacity_, other.capacity_);
  std::swap(max_size_, other.max_size_);
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
  const std::size_t capacity = round_up(std::max({wanted, doubled, kSmallest}), 4'096);
  std::uint8_t* bytes = allocate(capacity);
  if (size_ > 0) std::memcpy(bytes, bytes_, size_);
  deallocate(std::exchange(bytes_, bytes), std::exchange(capacity_, capacity));
}

void FrameBuffer::release() noexcept {
  deallocate(std::exchange(bytes_, nullptr), std::exchange(capacity_, 0));
  size_ = 0;
}

}  // namespace dmoe::net
