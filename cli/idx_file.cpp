#include "cli/idx_file.hpp"

#include <zlib.h>

#include <algorithm>
#include <array>
#include <memory>
#include <span>
#include <string>

namespace dmoe::cli {
namespace {

constexpr std::uint8_t kUnsignedByte = 0x08;  // The format's code of the element type.
constexpr std::size_t kReadBytes = 1U << 20U;

struct CloseGzip {
  void operator()(gzFile file) const noexcept { (void)gzclose(file); }
};
using GzipFile = std::unique_ptr<gzFile_s, CloseGzip>;

Error fault(const std::filesystem::path& file, const std::string& what) {
  return {Errc::kInvalidArgument, file.string() + ": " + what, {}};
}

/// Reads until `into` is full or the file ends; zlib passes plain files through.
Result<std::size_t> read_some(gzFile file, std::span<std::uint8_t> into, const std::filesystem::path& name) {
  std::size_t total = 0;
  while (total < into.size()) {
    const auto want = static_cast<unsigned>(std::min(into.size() - total, kReadBytes));
    const int got = gzread(file, into.data() + total, want);
    if (got < 0) {
      int code = 0;
      return fault(name, std::string("damaged gzip data: ") + gzerror(file, &code));
    }
    if (got == 0) break;
    total += static_cast<std::size_t>(got);
  }
  return total;
}

/// Sizes from the header; their product is checked against kMaxIdxBytes before anything is allocated for them.
Result<std::vector<std::uint32_t>> read_shape(gzFile file, const std::filesystem::path& name) {
  std::array<std::uint8_t, 4> word{};
  auto got = read_some(file, word, name);
  if (!got) return got.error();
  if (*got < word.size() || word[0] != 0 || word[1] != 0) return fault(name, "not an IDX file (wrong first bytes)");
  if (word[2] != kUnsignedByte) return fault(name, "IDX elements are not unsigned bytes, which are wanted here");
  const std::size_t dimensions = word[3];
  if (dimensions == 0 || dimensions > kMaxIdxDimensions) {
    return fault(name, std::to_string(dimensions) + " dimensions, but 1 to " + std::to_string(kMaxIdxDimensions) +
                           " are supported");
  }
  std::vector<std::uint32_t> shape;
  std::uint64_t total = 1;
  for (std::size_t i = 0; i < dimensions; ++i) {
    got = read_some(file, word, name);
    if (!got) return got.error();
    if (*got < word.size()) return fault(name, "ends inside its header");
    const std::uint32_t size = (std::uint32_t{word[0]} << 24U) | (std::uint32_t{word[1]} << 16U) |
                               (std::uint32_t{word[2]} << 8U) | std::uint32_t{word[3]};
    if (size == 0) return fault(name, "holds an empty array");
    total *= size;  // Cannot overflow: total was at most 2^30 and size is below 2^32.
    if (total > kMaxIdxBytes) return fault(name, "claims more than " + std::to_string(kMaxIdxBytes) + " bytes");
    shape.push_back(size);
  }
  return shape;
}

std::uint64_t product(const std::vector<std::uint32_t>& shape) {
  std::uint64_t total = 1;
  for (const std::uint32_t size : shape) total *= size;
  return total;
}

}  // namespace

Result<IdxArray> read_idx(const std::filesystem::path& file) {
  std::error_code error;
  if (!std::filesystem::exists(file, error)) return Error{Errc::kNotFound, file.string() + ": no such file", {}};
  if (!std::filesystem::is_regular_file(file, error)) return fault(file, "not a regular file");
  const GzipFile stream(gzopen(file.c_str(), "rbe"));
  if (!stream) return fault(file, "cannot be opened; check its permissions");
  auto shape = read_shape(stream.get(), file);
  if (!shape) return shape.error();
  const std::uint64_t total = product(*shape);
  IdxArray array{*std::move(shape), {}};
  while (array.data.size() < total) {
    const std::size_t before = array.data.size();
    const std::size_t step = std::min<std::uint64_t>(total - before, kReadBytes);
    array.data.resize(before + step);
    const auto got = read_some(stream.get(), std::span(array.data).subspan(before), file);
    if (!got) return got.error();
    if (*got < step) {
      return fault(file, "ends after " + std::to_string(before + *got) + " of " + std::to_string(total) +
                             " bytes; fetch it again");
    }
  }
  std::array<std::uint8_t, 1> extra{};
  const auto left = read_some(stream.get(), extra, file);  // Also makes zlib check the trailing checksum.
  if (!left) return left.error();
  if (*left != 0) return fault(file, "is longer than its header says");
  return array;
}

}  // namespace dmoe::cli
