// The IDX format of the MNIST family: a big-endian header and raw bytes.
#pragma once

#include "net/error.hpp"

#include <cstdint>
#include <filesystem>
#include <vector>

namespace dmoe::cli {

inline constexpr std::uint64_t kMaxIdxBytes = 1ULL << 30U;  ///< Larger arrays are refused.
inline constexpr std::size_t kMaxIdxDimensions = 4;

/// An array of bytes, row-major.
struct IdxArray {
  std::vector<std::uint32_t> shape;  ///< 1 to kMaxIdxDimensions sizes, each > 0.
  std::vector<std::uint8_t> data;    ///< product(shape) bytes.
};

/// Reads a file of unsigned bytes (type 0x08), plain or gzipped. Memory grows with what the file really holds, so a
/// header that lies costs nothing.
/// @return kNotFound: no such file; kInvalidArgument: not IDX, another type, too short, too long, or damaged gzip data;
/// the message names the file and the fault.
Result<IdxArray> read_idx(const std::filesystem::path& file);

}  // namespace dmoe::cli
