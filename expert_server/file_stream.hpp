// Large files from end to end, past the page cache, while a digest of their bytes is taken.
#pragma once

#include "expert_server/file_io.hpp"
#include "expert_server/piece_digest.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <future>
#include <memory>
#include <span>

namespace dmoe::expert_server {

/// Memory that the disk can reach by itself, kStreamPiece bytes.
using StreamPiece = std::unique_ptr<std::uint8_t[], decltype(&std::free)>;
inline constexpr std::size_t kStreamPiece = 4UL * 1024 * 1024;  ///< Whole pieces of a PieceDigest.

/// Writes a file from its start. While one piece is on its way to the disk, the next is filled and added to the digest.
/// Not thread-safe. May throw std::bad_alloc.
class StreamWriter {
 public:
  /// Both outlive this. The file is empty.
  StreamWriter(File& file, PieceDigest& digest);
  Result<void> add(std::span<const std::uint8_t> bytes);
  /// Everything is with the file then, though not fsynced. Returns its size.
  Result<std::uint64_t> finish();

 private:
  Result<void> flush();
  Result<void> wait();

  File& file_;
  PieceDigest& digest_;
  std::array<StreamPiece, 2> pieces_;
  std::size_t current_ = 0;  ///< Of pieces_: being filled.
  std::size_t filled_ = 0;
  std::uint64_t offset_ = 0;           ///< Of the piece being filled.
  std::future<Result<void>> writing_;  ///< Waits when it is destroyed, as `std::async` promises.
};

/// Reads the first `size` bytes of a file, in pieces of kStreamPiece, several at once. `on_piece` gets the number and
/// the bytes of each, on one of several threads, in any order; its exceptions are passed on.
/// @param into  aligned to kDirectAlignment, with room for whole blocks of it.
/// @return kInvalidArgument: the file ends before.
/// May throw std::bad_alloc, and std::system_error when there is no thread.
Result<void> read_in_pieces(File& file, std::uint64_t size, std::uint8_t* into,
                            const std::function<void(std::uint64_t, std::span<std::uint8_t>)>& on_piece);

}  // namespace dmoe::expert_server
