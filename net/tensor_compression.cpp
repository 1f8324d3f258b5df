#include "net/tensor_compression.hpp"

#include "net/value_coding.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <string>

namespace dmoe::net {
namespace {

/// What the format holds at most, as magnitude bits.
std::uint32_t most_in(Compression compression) noexcept {
  if (compression == Compression::kFloat16) return kMostInFloat16;
  return compression == Compression::kBfloat16 ? kMostInBfloat16 : kMostInInt8;
}

}  // namespace

std::size_t compressed_size(Compression compression, std::size_t count) noexcept {
  switch (compression) {
    case Compression::kNone: return count * sizeof(float);
    case Compression::kFloat16:
    case Compression::kBfloat16: return count * sizeof(std::uint16_t);
    case Compression::kInt8: return int8_blocks(count) * sizeof(float) + count;
  }
  return 0;
}

at::Tensor compress(const at::Tensor& tensor, Compression compression) {
  if (compression == Compression::kNone || tensor.scalar_type() != at::kFloat || tensor.numel() == 0) return {};
  const auto count = static_cast<std::size_t>(tensor.numel());
  const auto* values = tensor.data_ptr<float>();
  if (largest_magnitude(values, count) > most_in(compression)) return {};
  constexpr std::size_t kWord = 8;
  const std::size_t size = (compressed_size(compression, count) + kWord - 1) / kWord * kWord;
  auto coded = at::empty({static_cast<std::int64_t>(size)}, at::kByte);
  auto* bytes = coded.data_ptr<std::uint8_t>();
  std::fill_n(bytes + size - kWord, kWord, std::uint8_t{0});  // What pads the last word is sent too.
  switch (compression) {
    case Compression::kNone: break;
    case Compression::kFloat16: to_float16(values, count, reinterpret_cast<std::uint16_t*>(bytes)); break;
    case Compression::kBfloat16: to_bfloat16(values, count, reinterpret_cast<std::uint16_t*>(bytes)); break;
    case Compression::kInt8: {
      auto* scales = reinterpret_cast<float*>(bytes);
      to_int8(values, count, scales, reinterpret_cast<std::int8_t*>(scales + int8_blocks(count)));
    }
  }
  return coded;
}

Result<at::Tensor> decompress(std::span<const std::uint8_t> bytes, Compression compression,
                              const std::vector<std::int64_t>& sizes, std::size_t count) {
  // Before anything is allocated: `count` comes from a peer. At most 4 bytes for each that came.
  if (count > bytes.size() || compressed_size(compression, count) != bytes.size()) {
    return Error{Errc::kInvalidArgument,
                 std::to_string(bytes.size()) + " bytes of " + std::string(to_string(compression)) + " are not " +
                     std::to_string(count) + " values",
                 {}};
  }
  // Data of a message starts at a word.
  const auto* scales = reinterpret_cast<const float*>(bytes.data());
  if (compression == Compression::kInt8 &&
      !std::all_of(scales, scales + int8_blocks(count), [](float scale) { return std::isfinite(scale); })) {
    return Error{Errc::kInvalidArgument, "a scale of int8 values that is NaN or Inf", {}};
  }
  auto tensor = at::empty(sizes, at::kFloat);
  auto* values = tensor.data_ptr<float>();
  switch (compression) {
    case Compression::kNone: std::copy_n(scales, count, values); break;
    case Compression::kFloat16:
      from_float16(reinterpret_cast<const std::uint16_t*>(bytes.data()), count, values);
      break;
    case Compression::kBfloat16:
      from_bfloat16(reinterpret_cast<const std::uint16_t*>(bytes.data()), count, values);
      break;
    case Compression::kInt8:
      from_int8(scales, reinterpret_cast<const std::int8_t*>(scales + int8_blocks(count)), count, values);
  }
  return tensor;
}

}  // namespace dmoe::net
