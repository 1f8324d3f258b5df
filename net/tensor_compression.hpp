// Tensors as compressed bytes. Private to net_tensor: the codec decides what to do with them.
#pragma once

#include "net/compression.hpp"
#include "net/error.hpp"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace dmoe::net {

/// Bytes of `count` values. kInt8: the scales, float32, of all blocks; then a byte a value.
std::size_t compressed_size(Compression compression, std::size_t count) noexcept;

/// A uint8 tensor whose first compressed_size bytes are the coded values; its storage is a whole number of 8-byte
/// words. Undefined: `tensor` is not a non-empty float32 tensor whose values the format can hold.
/// @param tensor CPU, contiguous.
at::Tensor compress(const at::Tensor& tensor, Compression compression);

/// A float32 CPU tensor of its own memory. kInvalidArgument: `bytes` are not as many as `sizes` need, or a scale is not
/// finite. @param count the product of `sizes`.
Result<at::Tensor> decompress(std::span<const std::uint8_t> bytes, Compression compression,
                              const std::vector<std::int64_t>& sizes, std::size_t count);

}  // namespace dmoe::net
