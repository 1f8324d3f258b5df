#include "expert_server/file_stream.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

namespace dmoe::expert_server {
namespace {

/// Two cores are kept busy with digests while the disk answers the third.
constexpr std::size_t kReaders = 3;

StreamPiece new_piece() {
  StreamPiece piece(static_cast<std::uint8_t*>(std::aligned_alloc(kDirectAlignment, kStreamPiece)), &std::free);
  if (!piece) throw std::bad_alloc();
  return piece;
}

std::size_t aligned_up(std::size_t size) { return (size + kDirectAlignment - 1) / kDirectAlignment * kDirectAlignment; }

}  // namespace

StreamWriter::StreamWriter(File& file, PieceDigest& digest)
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
  digest_.add(offset_, {piece, filled_});
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

Result<std::uint64_t> StreamWriter::finish() {
  const auto size = offset_ + filled_;
  if (filled_ > 0) {
    if (auto done = flush(); !done) return done.error();
  }
  if (auto done = wait(); !done) return done.error();
  if (auto done = file_.resize(size); !done) return done.error();
  return size;
}

Result<void> read_in_pieces(File& file, std::uint64_t size, std::uint8_t* into,
                            const std::function<void(std::uint64_t, std::span<std::uint8_t>)>& on_piece) {
  file.bypass_cache();
  const auto pieces = static_cast<std::size_t>((size + kStreamPiece - 1) / kStreamPiece);
  std::atomic<std::size_t> next{0};
  std::atomic<bool> failed{false};
  const auto read = [&](std::size_t index) -> Result<void> {
    const auto offset = std::uint64_t{index} * kStreamPiece;
    const auto wanted = static_cast<std::size_t>(std::min<std::uint64_t>(kStreamPiece, size - offset));
    const std::span<std::uint8_t> piece(into + offset, wanted);
    const auto got = file.read_at(offset, {piece.data(), aligned_up(wanted)});
    if (!got) return got.error();
    if (*got < wanted) return file.ends_early();
    on_piece(offset, piece);
    return {};
  };
  const auto read_while_there_are = [&]() -> Result<void> {
    try {
      for (auto index = next++; index < pieces && !failed; index = next++) {
        if (auto done = read(index); !done) {
          failed = true;
          return done;
        }
      }
      return {};
    } catch (...) {
      failed = true;
      throw;
    }
  };
  std::vector<std::future<Result<void>>> others;  // Wait when they are destroyed.
  for (std::size_t i = 1; i < std::min(kReaders, pieces); ++i) {
    others.push_back(std::async(std::launch::async, read_while_there_are));
  }
  auto outcome = read_while_there_are();
  for (auto& other : others) {
    if (auto theirs = other.get(); outcome && !theirs) outcome = std::move(theirs);
  }
  return outcome;
}

}  // namespace dmoe::expert_server
