#include "expert_server/file_stream.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace dmoe::expert_server {
namespace {

StreamPiece new_piece() {
  StreamPiece piece(static_cast<std::uint8_t*>(std::aligned_alloc(kDirectAlignment, kStreamPiece)), &std::free);
  if (!piece) throw std::bad_alloc();
  return piece;
}

std::size_t aligned_up(std::size_t size) { return (size + kDirectAlignment - 1) / kDirectAlignment * kDirectAlignment; }

}  // namespace

StreamWriter::StreamWriter(File& file, Sha256Stream& digest)
    : file_(file), digest_(digest), pieces_{new_piece(), new_piece()} {
  file_.bypass_cache();
}

Result<void> StreamWriter::add(std::span<const std::uint8_t> bytes) {
  while (!bytes.empty()) {
    const auto size = std::min(bytes.size(), kStreamPiece - filled_);
    std::memcpy(pieces_[current_].get() + filled_, bytes.data(), size);
    filled_ += size;
    bytes = bytes.subspan(size);
    if (filled_ < kStreamPiece) continue;
    if (auto done = flush(); !done) return done;
  }
  return {};
}

/// Hands the current piece to the disk and begins the other one.
Result<void> StreamWriter::flush() {
  auto* piece = pieces_[current_].get();
  digest_.add({piece, filled_});
  if (auto done = wait(); !done) return done;
  const auto size = aligned_up(filled_);
  std::memset(piece + filled_, 0, size - filled_);
  writing_ = std::async(std::launch::async, [this, piece, size, offset = offset_] {
    return file_.write_at(offset, {piece, size});
  });
  offset_ += filled_;
  filled_ = 0;
  current_ = 1 - current_;
  return {};
}

Result<void> StreamWriter::wait() { return writing_.valid() ? writing_.get() : Result<void>{}; }

Result<void> StreamWriter::finish() {
  const auto size = offset_ + filled_;
  if (filled_ > 0) {
    if (auto done = flush(); !done) return done;
  }
  if (auto done = wait(); !done) return done;
  return file_.resize(size);
}

StreamReader::StreamReader(File& file, Sha256Stream& digest, std::uint64_t offset)
    : file_(file),
      digest_(digest),
      pieces_{new_piece(), new_piece()},
      next_(offset / kDirectAlignment * kDirectAlignment),
      skip_(static_cast<std::size_t>(offset - next_)) {
  file_.bypass_cache();
  read_next();
}

/// Begins to read into the piece that is not taken from.
void StreamReader::read_next() {
  reading_ = std::async(std::launch::async, [this, piece = pieces_[1 - current_].get(), offset = next_] {
    return file_.read_at(offset, {piece, kStreamPiece});
  });
  next_ += kStreamPiece;
}

Result<void> StreamReader::turn() {
  const auto got = reading_.get();
  if (!got) return got.error();
  current_ = 1 - current_;
  const auto skipped = std::min(std::exchange(skip_, 0), *got);
  left_ = {pieces_[current_].get() + skipped, *got - skipped};
  if (left_.empty()) return file_.ends_early();
  read_next();
  return {};
}

Result<void> StreamReader::take(std::span<std::uint8_t> into) {
  while (!into.empty()) {
    if (left_.empty()) {
      if (auto turned = turn(); !turned) return turned;
    }
    const auto size = std::min(into.size(), left_.size());
    digest_.add(left_.first(size));
    std::memcpy(into.data(), left_.data(), size);
    left_ = left_.subspan(size);
    into = into.subspan(size);
  }
  return {};
}

}  // namespace dmoe::expert_server
