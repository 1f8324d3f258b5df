// Large files from end to end, past the page cache, while a digest of their bytes is taken.
#pragma once

#include "expert_server/file_io.hpp"
#include "expert_server/sha256_stream.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <future>
#include <memory>
#include <span>

namespace dmoe::expert_server {

/// Memory that the disk can reach by itself, kStreamPiece bytes.
using StreamPiece = std::unique_ptr<std::uint8_t[], decltype(&std::free)>;
inline constexpr std::size_t kStreamPiece = 4UL * 1024 * 1024;

/// Writes a file from its start. While one piece is on its way to the disk, the next is filled and added to the digest.
/// Not thread-safe. May throw std::bad_alloc.
class StreamWriter {
 public:
  /// Both outlive this. The file is empty.
  StreamWriter(File& file, Sha256Stream& digest);
  Result<void> add(std::span<const std::uint8_t> bytes);
  Result<void> finish();  ///< Everything is with the file then, though not fsynced.

 private:
  Result<void> flush();
  Result<void> wait();

  File& file_;
  Sha256Stream& digest_;
  std::array<StreamPiece, 2> pieces_;
  std::size_t current_ = 0;  ///< Of pieces_: being filled.
  std::size_t filled_ = 0;
  std::uint64_t offset_ = 0;           ///< Of the piece being filled.
  std::future<Result<void>> writing_;  ///< Waits when it is destroyed, as `std::async` promises.
};

/// Reads a file from `offset` on. While the next piece is read, this one is added to the digest and copied to where it
/// belongs. Not thread-safe. May throw std::bad_alloc.
class StreamReader {
 public:
  StreamReader(File& file, Sha256Stream& digest, std::uint64_t offset);
  /// The next bytes. kInvalidArgument: the file ends before.
  Result<void> take(std::span<std::uint8_t> into);

 private:
  void read_next();
  Result<void> turn();

  File& file_;
  Sha256Stream& digest_;
  std::array<StreamPiece, 2> pieces_;
  std::size_t current_ = 0;             ///< Of pieces_: being taken from.
  std::span<const std::uint8_t> left_;  ///< Of the current piece.
  std::uint64_t next_;                  ///< Where the piece after those begins.
  std::size_t skip_;                    ///< Bytes of the first piece that are not wanted.
  std::future<Result<std::size_t>> reading_;
};

}  // namespace dmoe::expert_server
