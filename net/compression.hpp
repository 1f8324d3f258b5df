// How the values of a tensor may travel.
#pragma once

#include "net/error.hpp"
#include "net/schema/tensor.capnp.h"

#include <array>
#include <string_view>

namespace dmoe {

/// How float32 values lie on the wire; tensors of other types always travel as they are. So does a tensor with a value
/// that the format cannot hold (NaN, Inf, beyond float16's 65504): the receiver sees what was sent, never a clipped
/// one.
enum class Compression {
  kNone,      ///< 4 bytes a value, exact.
  kFloat16,   ///< 2 bytes; error at most |x| / 2,048, or 2^-25 below 2^-14. Small gradients may vanish: prefer
              ///< kBfloat16.
  kBfloat16,  ///< 2 bytes; error at most |x| / 256 over all of float32's range.
  kInt8,      ///< 1.03 bytes; per block of 128 values one scale: error at most the block's largest magnitude / 254.
};

inline constexpr std::array kCompressions{Compression::kNone, Compression::kFloat16, Compression::kBfloat16,
                                          Compression::kInt8};

/// "none", "float16", "bfloat16", "int8".
std::string_view to_string(Compression compression) noexcept;
/// kInvalidArgument lists the names.
Result<Compression> parse_compression(std::string_view name);

namespace net {

schema::Compression to_wire(Compression compression) noexcept;
/// kInvalidArgument: a number that a newer peer may know.
Result<Compression> from_wire(schema::Compression compression);

}  // namespace net
}  // namespace dmoe
